"""Parts of a model that are not trained: the hyperparameter ``freeze``."""

from collections.abc import Iterable

from torch import nn

from flyte_ddp.errors import UserError
from flyte_ddp.models.initial_weights import is_in_parts, split_part_names, unknown_part_error


def freeze_parts(model: nn.Module, freeze: str) -> list[str]:
    """Clear ``requires_grad`` of the parts that ``freeze`` names; return the frozen modules; UserError if unknown."""
    parts = split_part_names(freeze)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    names = [*modules, *parameters]
    if unknown := [part for part in parts if part not in names]:
        raise unknown_part_error(f"freeze={freeze!r}", unknown[0], names)
    for name, parameter in parameters.items():
        if is_in_parts(name, parts):
            parameter.requires_grad_(False)
    if parts and not any(parameter.requires_grad for parameter in parameters.values()):
        raise UserError(f"freeze={freeze!r}: leaves nothing to train; freeze fewer parts")
    return [name for name in modules if is_in_parts(name, parts)]


def set_training_mode(model: nn.Module, frozen: Iterable[str]) -> None:
    """Set the model to training mode, and its modules named in ``frozen`` to evaluation mode."""
    model.train()  # called as in every training loop: a model may override it to keep layers in evaluation mode
    for name in frozen:
        model.get_submodule(name).eval()
