"""A trained model on disk: the weights in ``model.pt``, and a description (sidecar) in ``model.json``."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.files import SIDECAR, WEIGHTS, HashingFile, explain_write_errors, replace_file, sync
from flyte_ddp.core.models.inputs import InputSpec, LeafSpec, LeavesSpec, ModelInput
from flyte_ddp.core.models.sidecar import EVALUATION_SHARE, FIX, ImageInput, LeavesInput, Sidecar


def save_model(folder: Path, state_dict: dict[str, Tensor], sidecar: Sidecar) -> tuple[Path, Path]:
    """Write ``model.pt`` and ``model.json`` (the sidecar) into a folder, and return the two paths.

    Creates the folder, and replaces older files. ``state_dict`` must come from the model itself, not from DDP's or
    torch.compile's wrapper. The SHA-256 of ``model.pt`` is added to ``model.json``.

    Raises:
        UserError: Writing failed.
    """
    model_path, sidecar_path = folder / WEIGHTS, folder / SIDECAR
    # The sidecar is renamed last, so a sidecar never exists without weights.
    with replace_file(sidecar_path) as sidecar_file, replace_file(model_path) as model_file:
        hashing = HashingFile(model_file)
        # Equal weights are equal bytes in torch's zip format. Its older format contains memory addresses.
        torch.save(copy_state_dict_to_cpu(state_dict), hashing)  # type: ignore[arg-type]
        content = replace(sidecar, digests=replace(sidecar.digests, weights=hashing.sha256.hexdigest())).to_json_value()
        with explain_write_errors(sidecar_path):
            sidecar_file.write(json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")
            sync(sidecar_file)
    return model_path, sidecar_path


def copy_state_dict_to_cpu(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a copy of the state_dict with all tensors on the CPU, in row-major order, without shared storage.

    Values that are no tensors are not copied.
    """
    portable = copy.copy(state_dict)  # keeps ``_metadata``, which a new dict would lack
    for name, value in state_dict.items():
        if isinstance(value, Tensor):
            own = value.detach().cpu()
            strided = own.layout == torch.strided
            portable[name] = own.clone(memory_format=torch.contiguous_format) if strided else own.clone()
    return portable


def load_weights(model: nn.Module, model_path: Path, sidecar: Sidecar) -> None:
    """Load ``model.pt`` into ``model``. Does not verify the SHA-256. ``sidecar`` names the model in errors.

    Raises:
        UserError: The file cannot be read, holds other objects than weights, or does not fit the model.
    """
    try:
        model.load_state_dict(torch.load(model_path, map_location="cpu", weights_only=True))
    except Exception as error:  # of the readers of torch, pickle and zip files
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{model_path} does not fit model {sidecar.model!r}: {reason}; use the code that trained the model"
        ) from error


def make_input_spec(described: ImageInput | LeavesInput) -> ModelInput:
    """Return the model's input that the entry ``input`` of ``model.json`` describes.

    Raises:
        UserError: Mean and std do not fit the channels, or ``crop_share`` is out of range.
    """
    if isinstance(described, ImageInput):
        return make_image_spec(described)
    leaves = ((name, LeafSpec((*leaf.shape,), leaf.dtype)) for name, leaf in described.leaves.items())
    return LeavesSpec(described.form, (*leaves,))


def make_image_spec(described: ImageInput) -> InputSpec:
    """Return a model's input of images that the entry ``input`` of ``model.json`` describes.

    If ``crop_share`` is missing, 224 / 256 is assumed.

    Raises:
        UserError: Mean and std do not fit the channels, or ``crop_share`` is out of range.
    """
    share, mean, std = described.crop_share or EVALUATION_SHARE, described.mean, described.std
    if not len(mean) == len(std) == described.channels or min(std) <= 0 or not 0 < share <= 1:
        raise UserError(
            "model.json: input must have a mean and a std above 0 for each channel, and a crop_share of at most 1; "
            f"{FIX}"
        )
    return InputSpec(described.channels, described.height, described.width, (*mean,), (*std,), share)
