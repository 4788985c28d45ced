"""Checks of a model's layers and of its state_dict, before and while the model is trained."""

import reprlib
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import torch
from torch import Tensor, nn

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.parallel.distributed import world_size


def check_layers_and_state_dict(name: str, model: nn.Module) -> None:
    """Raise UserError if a model has layers that several ranks cannot train exactly, or a state that cannot be saved.

    Layers are checked only if this process is one of several ranks. The state is checked by
    :func:`check_state_dict`.
    """
    for place, module in model.named_modules() if world_size() > 1 else ():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and (module.max_norm or module.scale_grad_by_freq):
            raise UserError(
                f"model {name!r} has layer {place or type(module).__name__} with max_norm or scale_grad_by_freq, which "
                "use the samples of one rank only; remove these arguments, or set num_ranks=1"
            )
    check_state_dict(name, model.state_dict())


def check_state_dict(name: str, state_dict: Mapping[str, Any]) -> None:
    """Raise UserError if ``torch.load(weights_only=True)`` would reject an entry of the state_dict.

    Tensors are not examined. Other values are pickled and loaded in memory. ``name`` is the model's name in the error.
    """
    if found := find_unloadable_value(state_dict):
        key, value = found
        raise UserError(
            f"model {name!r} has {reprlib.repr(value)} in {key}, which torch.load(weights_only=True) rejects; keep "
            "only tensors, numbers, text, None, and dicts, lists, tuples and sets of these in the state_dict"
        )


def find_unloadable_value(state_dict: Mapping[str, Any]) -> tuple[str, object] | None:
    """Return key and value of the first entry that ``torch.load(weights_only=True)`` would reject, or None.

    Tensors are not examined. Other values are pickled and loaded in memory.
    """
    extra = {key: value for key, value in state_dict.items() if not isinstance(value, Tensor)}
    extra["_metadata"] = getattr(state_dict, "_metadata", None)  # versions of modules, and a user's objects
    for key, value in extra.items():
        file = BytesIO()
        try:
            torch.save(value, file)
            file.seek(0)
            torch.load(file, weights_only=True)
        except Exception:  # pickle or the value's class may raise anything
            return key, value
    return None
