"""Check, save and restore the state that optimisers keep between steps."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.models.state_dicts import find_unloadable_value
from flyte_ddp.core.runs.checkpoint import State

Attributes = dict[str, Any]  # numbers, truth values and tensors of an optimiser, by name


def check_optimizer_state(optimizer: Optimizer, spec: str) -> None:
    """Raise UserError if a checkpoint could not save and restore an optimiser's state completely.

    Call this function after the first step, when the state exists. ``spec`` names the optimiser in errors.
    """
    try:
        saved = optimizer.state_dict()
    except (NotImplementedError, RuntimeError) as error:  # of optimisers that distribute state over the ranks
        raise UserError(
            f"optimizer={spec!r}: state_dict() fails ({error or type(error).__name__}), and a checkpoint needs the "
            "state; use an optimiser that does not distribute state over the ranks"
        ) from error
    places = {leaf.data_ptr() for leaf in tree_leaves(saved) if isinstance(leaf, Tensor)}
    for name, inner in list_inner_optimizers(optimizer):
        kept = (leaf for leaf in tree_leaves([*inner.state.values()]) if isinstance(leaf, Tensor) and leaf.numel())
        if any(leaf.data_ptr() not in places for leaf in kept):
            raise UserError(
                f"optimizer={spec!r}: the state of the attribute {name} ({type(inner).__name__}) is missing in "
                "state_dict(), and would be missing in checkpoints; return the inner optimisers as a list"
            )
    parts = {**saved}  # an optimiser may have other parts than torch's two
    for number, values in parts.pop("state", {}).items():
        items = values.items() if isinstance(values, Mapping) else [("", values)]
        parts |= {f"state[{number}][{key!r}]": value for key, value in items}
    for number, group in enumerate(parts.pop("param_groups", [])):
        parts |= {f"param_groups[{number}][{key!r}]": value for key, value in group.items()}
    if found := find_unloadable_value(parts):
        key, value = found
        raise UserError(
            f"optimizer={spec!r}: keeps a {type(value).__name__} in {key}, which torch.load(weights_only=True) rejects "
            "when it loads a checkpoint; keep only tensors, numbers, text, and dicts and lists of these in the state"
        )


def list_inner_optimizers(optimizer: Any) -> Iterator[tuple[str, Optimizer]]:
    """Yield each optimiser that another optimiser holds in its attributes, as (path of the attribute, optimiser).

    Searches nested attributes. Does not yield ``optimizer``.
    """
    seen = {id(optimizer)}
    waiting = [("", optimizer)]
    while waiting:
        path, holder = waiting.pop()
        for name, value in vars(holder).items():
            for inner in () if name == "state" else tree_leaves(value):
                is_optimizer = isinstance(inner, Optimizer)
                is_helper = isinstance(holder, Optimizer) and hasattr(inner, "__dict__") and not callable(inner)
                if (is_optimizer or (is_helper and not isinstance(inner, Tensor))) and id(inner) not in seen:
                    seen.add(id(inner))
                    waiting.append((f"{path}{name}.", inner))
                    if is_optimizer:
                        yield path + name, inner


def read_plain_attributes(optimizer: Optimizer) -> list[Attributes]:
    """Return the numbers, truth values and tensors among an optimiser's attributes, for example a count of steps.

    A ``state_dict`` does not have these attributes. Tensors are not copied.

    Returns:
        A dict for the optimiser, and then a dict for each inner optimiser.
    """
    kinds = (bool, int, float, Tensor)
    holders = [optimizer, *(inner for _, inner in list_inner_optimizers(optimizer))]
    return [{name: value for name, value in vars(holder).items() if type(value) in kinds} for holder in holders]


def list_changed_attributes(optimizer: Optimizer, before: list[Attributes]) -> list[Attributes]:
    """Return those of :func:`read_plain_attributes` that differ from ``before``, an earlier result copied to the CPU.

    Only these belong in a checkpoint. Attributes that no step changes may be specific to this rank.
    """
    pairs = zip(read_plain_attributes(optimizer), before, strict=True)
    return [
        {name: value for name, value in now.items() if name not in old or not is_same_value(value, old[name])}
        for now, old in pairs
    ]


def is_same_value(value: Any, other: Any) -> bool:
    """Return whether two attributes have the same type and value. ``other`` must be on the CPU."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.equal(value.cpu(), other)
    return type(value) is type(other) and bool(value == other)


def set_attributes(optimizer: Optimizer, saved: list[Attributes]) -> None:
    """Set the attributes that :func:`list_changed_attributes` returned, on an optimiser and its inner optimisers.

    Tensors are moved to the devices of the present values.
    """
    holders = [optimizer, *(inner for _, inner in list_inner_optimizers(optimizer))]
    for holder, values in zip(holders, saved, strict=True):
        for name, value in values.items():
            now = vars(holder).get(name)
            vars(holder)[name] = value.to(now.device) if isinstance(now, Tensor) else value


def load_optimizer_state(optimizer: Optimizer, saved: State) -> None:
    """Load a ``state_dict`` into an optimiser, and keep the types of the saved values.

    Torch alone would cast tensors to the parameter's type, and lose texts. Inner optimisers keep the saved types, too.
    """
    with ExitStack() as hooks:
        for each in (optimizer, *(inner for _, inner in list_inner_optimizers(optimizer))):
            with suppress(AttributeError):  # a wrapper may not have called torch's constructor
                restorer = SavedTypesHooks()
                before = each.register_load_state_dict_pre_hook(restorer.keep_saved_state)
                hooks.callback(before.remove)
                hooks.callback(each.register_load_state_dict_post_hook(restorer.restore_saved_types).remove)
        optimizer.load_state_dict(saved)


class SavedTypesHooks:
    """Hooks of an optimiser's ``load_state_dict`` that undo torch's casts."""

    saved: State

    def keep_saved_state(self, _: Optimizer, saved: State) -> None:
        """Store the ``state_dict`` that is about to be loaded. This is the hook before loading."""
        self.saved = saved

    def restore_saved_types(self, optimizer: Optimizer) -> None:
        """Replace the state that torch has loaded by the saved values. This is the hook after loading.

        Tensors are copied to the devices of the loaded tensors.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        numbers = [number for group in self.saved["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in self.saved["state"]:
                state = restore_types_and_devices(self.saved["state"][number], optimizer.state[parameter])
                optimizer.state[parameter] = state


def restore_types_and_devices(saved: Any, loaded: Any) -> Any:
    """Return a copy of a saved value with the saved types, and with tensors on the devices of ``loaded``.

    ``loaded`` is the value that torch has made of the saved value.
    """
    if isinstance(saved, Tensor):
        return saved.to(loaded.device, copy=True)  # the checkpoint is mapped from its file
    if type(saved) in (dict, OrderedDict):
        return type(saved)((key, restore_types_and_devices(value, loaded[key])) for key, value in saved.items())
    if type(saved) in (list, tuple):
        return type(saved)(restore_types_and_devices(*pair) for pair in zip(saved, loaded, strict=True))
    return saved
