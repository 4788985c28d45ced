"""Find and freeze parts of a model by the names of modules or tensors. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from flyte_ddp.core.errors import UserError

if TYPE_CHECKING:
    from torch import nn

MOST_NAMED = 12  # maximum number of a model's parts in an error


def split_part_names(names: str) -> list[str]:
    return [part.strip().rstrip(".") for part in names.split(",") if part.strip()]


def make_unknown_part_error(setting: str, part: str, names: Iterable[str]) -> UserError:
    """Return the UserError for a part that the model does not have. The error lists the model's first parts.

    ``setting`` begins the error. ``names`` are the names of all modules or tensors of the model.
    """
    parts = [*dict.fromkeys(name.partition(".")[0] for name in names)]
    more = ", ..." if len(parts) > MOST_NAMED else ""
    return UserError(
        f"{setting}: the model has no part {part!r}; its parts are {', '.join(parts[:MOST_NAMED])}{more}, and the "
        "modules and tensors in these parts"
    )


def is_in_parts(name: str, parts: Iterable[str]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def freeze_parts(model: nn.Module, freeze: str) -> list[str]:
    """Turn off gradients of the parts that ``freeze`` names, and return the names of all modules in these parts.

    ``freeze`` has names of modules or parameters, separated by commas. The mode of the modules is not changed.

    Raises:
        UserError: A part is unknown, or all parameters would be frozen.
    """
    parts = split_part_names(freeze)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    names = [*modules, *parameters]
    if unknown := [part for part in parts if part not in names]:
        raise make_unknown_part_error(f"freeze={freeze!r}", unknown[0], names)
    for name, parameter in parameters.items():
        if is_in_parts(name, parts):
            parameter.requires_grad_(False)
    if parts and not any(parameter.requires_grad for parameter in parameters.values()):
        raise UserError(f"freeze={freeze!r}: leaves nothing to train; freeze fewer parts")
    return [name for name in modules if is_in_parts(name, parts)]


def set_training_mode(model: nn.Module, frozen: Iterable[str]) -> None:
    """Set the model to training mode, and the modules named in ``frozen`` to evaluation mode."""
    model.train()  # called on the whole model, because a model may override train() to keep layers in evaluation mode
    for name in frozen:
        model.get_submodule(name).eval()
