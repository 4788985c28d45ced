"""A trained model on disk: the weights in ``model.pt``, and a description (sidecar) in ``model.json``."""

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flyte_ddp.checks.forms import require_form
from flyte_ddp.errors import UserError
from flyte_ddp.files import SIDECAR, WEIGHTS, HashingFile, explain_write_errors, file_digest, replace_file, sync
from flyte_ddp.models import zoo
from flyte_ddp.models.inputs import EVALUATION_SHARE, MIDDLE, InputSpec, LeafSpec, LeavesSpec, ModelInput
from flyte_ddp.models.sidecar import FORMAT, read_model_json
from flyte_ddp.samples.pictures import BACKGROUND

# The entries from which a model is built. Other readers accept a model.json without them.
LOADED = {"model": str, "classes": list, "input": {}, "digests": {"weights": str}, "options?": {"model?": {}}}


def save_model(folder: Path, state_dict: dict[str, Tensor], sidecar: Mapping[str, Any]) -> tuple[Path, Path]:
    """Write ``model.pt`` and ``model.json`` into a folder, replacing older files, and return the two paths.

    Creates the folder. ``state_dict`` must come from the model itself, not from DDP's or torch.compile's wrapper.
    ``model.json`` also gets ``format`` and ``digests.weights``, the SHA-256 of ``model.pt``.

    Raises:
        UserError: Writing failed.
    """
    model_path, sidecar_path = folder / WEIGHTS, folder / SIDECAR
    # The sidecar is renamed last, so a sidecar never exists without weights.
    with replace_file(sidecar_path) as sidecar_file, replace_file(model_path) as model_file:
        hashing = HashingFile(model_file)
        # Equal weights are equal bytes in torch's zip format. Its older format contains memory addresses.
        torch.save(portable_state_dict(state_dict), hashing)  # type: ignore[arg-type]
        digests = {**sidecar.get("digests", {}), "weights": hashing.sha256.hexdigest()}
        content = {"format": FORMAT, **sidecar, "digests": digests}
        with explain_write_errors(sidecar_path):
            sidecar_file.write(json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")
            sync(sidecar_file)
    return model_path, sidecar_path


def portable_state_dict(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state_dict with copies of the tensors on the CPU, in row-major order, without shared storage.

    Values that are no tensors are not copied.
    """
    portable = copy.copy(state_dict)  # keeps ``_metadata``, which a new dict would lack
    for name, value in state_dict.items():
        if isinstance(value, Tensor):
            own = value.detach().cpu()
            strided = own.layout == torch.strided
            portable[name] = own.clone(memory_format=torch.contiguous_format) if strided else own.clone()
    return portable


def load_model(
    model_path: Path, sidecar_path: Path, device: torch.device | str = "cpu"
) -> tuple[nn.Module, dict[str, Any]]:
    """Return the trained model in evaluation mode on ``device``, and the content of the sidecar.

    Draws random numbers, because new weights are made first. A ``package.module:callable`` is imported from the sources
    in the sidecar. If today's code is the same, or if the sidecar has no sources, today's code is imported. If user
    code is named, the working directory is put on ``sys.path``. Exceptions of this code pass through. Trust both files
    as you trust code.

    Raises:
        UserError: A file is missing or damaged, the files are from different runs, or the weights do not fit the model.
            Also if the callable cannot be loaded.
    """
    sidecar = read_model_json(sidecar_path)
    require_form(sidecar, LOADED, f"sidecar {sidecar_path} is damaged, so give the model.json of a finished run")
    if len({*sidecar["classes"]}) < len(sidecar["classes"]):
        raise UserError(f"sidecar {sidecar_path}: duplicate class names; give the model.json of a finished run")
    try:
        digest = file_digest(model_path)
    except OSError as error:
        raise UserError(
            f"cannot read model {model_path}: {error.strerror}; give the model.pt of a finished run"
        ) from error
    if digest != sidecar["digests"]["weights"]:
        raise UserError(
            f"{model_path} is damaged or not the model of {sidecar_path}: its SHA-256 is {digest[:12]}..., "
            f"not {sidecar['digests']['weights'][:12]}...; take both files from the same run"
        )
    outputs = int(sidecar.get("outputs", len(sidecar["classes"])))
    options = sidecar.get("options", {}).get("model", {})
    called = (sidecar["model"], outputs, parse_input_spec(sidecar), options)
    if ":" not in sidecar["model"]:
        require_small_enough(model_path, *called)
    model = zoo.build_model(*called)
    load_weights(model, model_path, sidecar)
    return model.to(device).eval(), sidecar


def require_small_enough(model_path: Path, name: str, *called: Any) -> None:
    """Raise UserError if a built-in model has more numbers than the file has bytes, before memory is allocated.

    Args:
        model_path: The file of the weights.
        name: The name of the model.
        called: The further arguments of :func:`flyte_ddp.models.zoo.build_model`.

    Raises:
        UserError: The model is too large, or cannot be built with these arguments.
    """
    try:
        with torch.device("meta"):
            model = zoo.build_model(name, *called)
    except UserError:
        raise
    except Exception as error:  # torchvision's constructors may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{model_path}: model {name!r} cannot be built for this input ({reason})") from error
    numbers = sum(each.numel() for each in model.parameters())
    if numbers > model_path.stat().st_size:
        raise UserError(
            f"{model_path} does not fit model {name!r}: the file is too small for the model's {numbers:,} weights"
        )


def load_weights(model: nn.Module, model_path: Path, sidecar: Mapping[str, Any]) -> None:
    """Load ``model.pt`` into ``model``, without a check of the SHA-256.

    Raises:
        UserError: The file cannot be read, holds other objects than weights, or does not fit the model.
    """
    try:
        model.load_state_dict(torch.load(model_path, map_location="cpu", weights_only=True))
    except Exception as error:  # of the readers of torch, pickle and zip files
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{model_path} does not fit model {sidecar['model']!r}: {reason}; use the code that trained the model"
        ) from error


def describe_model_input(spec: ModelInput, crop: str) -> dict[str, Any]:
    """Return ``input`` of ``model.json``: the model's input, and how other programs prepare an image.

    ``crop`` is "middle" if the model was evaluated on the middle square of images. Inputs that are no images have no
    preparation.
    """
    if isinstance(spec, LeavesSpec):
        return spec.to_dict()
    middle = crop == MIDDLE
    return {
        **asdict(spec),
        "mean": list(spec.mean),
        "std": list(spec.std),
        "crop": crop,
        # The steps of the preparation, in order. docs/model.md shows the steps as a program.
        "upright": True,  # an image is rotated as its EXIF data say
        "background": list(BACKGROUND),  # RGB, behind the transparent parts of an image
        "mode": {1: "L", 3: "RGB"}.get(spec.channels, ""),  # Pillow's name of the colour space
        "crop_share": spec.crop_share if middle else None,  # the middle square's side / the image's shorter side
        "resize_dtype": "uint8" if middle else "float32",  # type of the resized values: uint8 rounds them
        "interpolation": "bilinear",
        "antialias": True,
        "scale": 1 / 255,
    }


def parse_input_spec(sidecar: Mapping[str, Any]) -> ModelInput:
    """Return the model's input as the sidecar describes it. If ``crop_share`` is missing, 224 / 256 is assumed.

    Raises:
        UserError: Mean and std do not fit the channels, or ``crop_share`` is out of range.
    """
    values = sidecar["input"]
    if "leaves" in values:
        leaves = {name: LeafSpec(tuple(leaf["shape"]), leaf["dtype"]) for name, leaf in values["leaves"].items()}
        return LeavesSpec(values["form"], (*leaves.items(),))
    share = values.get("crop_share") or EVALUATION_SHARE
    mean, std = tuple(values["mean"]), tuple(values["std"])
    if not len(mean) == len(std) == values["channels"] or min(std) <= 0 or not 0 < share <= 1:
        raise UserError(
            "model.json: input must have a mean and a std above 0 for each channel, and a crop_share of at most 1; "
            "give the model.json of a finished run"
        )
    return InputSpec(values["channels"], values["height"], values["width"], mean, std, share)
