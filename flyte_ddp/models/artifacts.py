"""Load a trained model from its files."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.files import file_digest
from flyte_ddp.core.models.saving import load_weights, make_input_spec
from flyte_ddp.core.models.sidecar import FIX, Sidecar
from flyte_ddp.models import zoo
from flyte_ddp.models.stored_code import read_model_json


def load_model(model_path: Path, sidecar_path: Path, device: torch.device | str = "cpu") -> tuple[nn.Module, Sidecar]:
    """Return the trained model in evaluation mode on ``device``, and the content of ``model.json`` (the sidecar).

    A user-defined model is imported. If the user's code has changed since the training, the code stored in
    ``model.json`` is imported instead. Puts the working directory on ``sys.path`` if user code is named. Exceptions of
    user code pass through. Draws random numbers, because the model is first built with new weights. Trust both files as
    you trust code.

    Raises:
        UserError: A file is missing or damaged, the files are from different runs, or the weights do not fit the model.
            Also if the callable cannot be loaded.
    """
    sidecar = read_model_json(sidecar_path)
    if len({*sidecar.classes}) < len(sidecar.classes):
        raise UserError(f"sidecar {sidecar_path}: duplicate class names; {FIX}")
    try:
        digest = file_digest(model_path)
    except OSError as error:
        raise UserError(
            f"cannot read model {model_path}: {error.strerror}; give the model.pt of a finished run"
        ) from error
    if digest != sidecar.digests.weights:
        raise UserError(
            f"{model_path} is damaged or not the model of {sidecar_path}: its SHA-256 is {digest[:12]}..., "
            f"not {sidecar.digests.weights[:12]}...; take both files from the same run"
        )
    outputs = len(sidecar.classes) if sidecar.outputs is None else sidecar.outputs
    called = (sidecar.model, outputs, make_input_spec(sidecar.input), sidecar.options.get("model", {}))
    if ":" not in sidecar.model:
        check_model_fits_file_size(model_path, *called)
    model = zoo.build_model(*called)
    load_weights(model, model_path, sidecar)
    return model.to(device).eval(), sidecar


def check_model_fits_file_size(model_path: Path, name: str, *called: Any) -> None:
    """Raise UserError if a built-in model has more weights than the file has bytes.

    Allocates no memory for the weights.

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
