"""Keep the registered buffers of a model alike on all ranks: as with DDP, those of rank 0 count.

What ``forward`` changes must be a registered buffer that is there, with its final shape, when the model is made. The
buffers of BatchNorm, which has rules of its own (batch_norm.py), are only copied for checkpoints.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flyte_ddp.errors import UserError
from flyte_ddp.parallel.distributed import copy_from_rank_0, has_own_elements, rank, world_size
from flyte_ddp.parallel.node_memory import cut, sizes


class Buffers:
    """The buffers of a model in training, by all their names; without sparse and expanded ones, which stay as they are.

    ``own`` are the names of those that do not belong to BatchNorm; ``unsaved`` those of ``own`` that are not in the
    model's ``state_dict``. A model without buffers costs nothing in a step.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        values = buffers_of(model)
        self.layout = layout_of(values)
        modules = model.named_modules(remove_duplicate=False)
        norms = {prefix for prefix, module in modules if isinstance(module, _BatchNorm)}
        self.own = [name for name in values if name.rpartition(".")[0] not in norms]
        saved = model.state_dict().keys()
        self.unsaved = [name for name in self.own if name not in saved]
        self.first = {name: values[name].clone() for name in self.own}
        self.changed: set[str] = set()  # before the run was cut off
        self.after_step = {name: value.clone() for name, value in values.items()} if rank() == 0 else {}
        shared = [values[name] for name in self.own] if world_size() > 1 else []
        pieces = [(value.numel(), value.dtype) for value in shared]
        self.flat = torch.zeros(sum(sizes(pieces)), dtype=torch.uint8, device=next(model.parameters()).device)
        flats = cut(self.flat, pieces)
        self.places = [flat.view(value.shape) for value, flat in zip(shared, flats, strict=True)]

    def current(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the buffers of the model, or of its average, by name.

        Raises:
            UserError: the model does not have the buffers, with their shapes and types, that it was made with.
        """
        values = buffers_of(model)
        if (layout := layout_of(values)) != self.layout:
            first = min(name for name in layout | self.layout if layout.get(name) != self.layout.get(name))
            raise UserError(
                f"buffer {first}: was registered, removed or resized while the model was in use; register it with its "
                "final shape and type where you make the model, or keep it in a plain attribute if no file must hold it"
            )
        return values

    @torch.no_grad()
    def copy_from_rank_0(self) -> None:
        """Overwrite the buffers of all other ranks by rank 0's, in one broadcast; all ranks call it after a step.

        All of them, changed or not: what a rank has changed only that rank knows, and to ask costs as much.
        """
        if not self.own:
            return
        current = self.current(self.model)
        if not self.places:
            return
        values = [current[name] for name in self.own]
        if rank() == 0:
            torch._foreach_copy_(self.places, values)
        copy_from_rank_0([self.flat])
        if rank() != 0:
            for value, place in zip(values, self.places, strict=True):
                value.copy_(place)  # one by one: _foreach_copy_ does not write to conjugate views

    @torch.no_grad()
    def keep(self) -> None:
        """Copy all buffers after a step, on rank 0.

        Rank 0 writes checkpoints in a thread, while the next forward pass changes the buffers.
        """
        if self.after_step:
            values = self.current(self.model)
            torch._foreach_copy_([*self.after_step.values()], [values[name] for name in self.after_step])

    def after_step_in(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a copy of the model's ``state_dict`` (with its ``_metadata``) with the buffers of the last step."""
        as_it_was = copy.copy(state_dict)
        as_it_was.update({name: self.after_step[name] for name in state_dict if name in self.after_step})
        return as_it_was

    def names_of_changed(self) -> list[str]:
        """Return, on rank 0, the names of the buffers that forward passes have changed since the run began."""
        now = {name for name in self.own if not torch.equal(self.after_step[name], self.first[name])}
        return sorted(self.changed | now)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs beside the model's ``state_dict``; on rank 0."""
        return {
            "unsaved": {name: self.after_step[name] for name in self.unsaved},
            "changed": self.names_of_changed(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was called; the model has loaded its own ``state_dict`` before."""
        values = self.current(self.model)
        for name in self.own:
            if name in state["unsaved"]:
                values[name].copy_(state["unsaved"][name])
            else:
                self.first[name].copy_(values[name])
        self.changed = {*state["changed"]}
        self.keep()

    @contextmanager
    def as_saved(self, model: nn.Module) -> Iterator[None]:
        """Give the model, or its average, the buffers that saving and loading would give it; restore them at the end.

        So buffers that no ``state_dict`` holds have the values of a new model, and an evaluation leaves no trace.
        """
        with torch.no_grad():
            values = self.current(model)
            before = {name: values[name].clone() for name in self.own}
            for name in self.unsaved:
                values[name].copy_(self.first[name])
        yield
        with torch.no_grad():
            values = self.current(model)
            for name in self.own:
                values[name].copy_(before[name])


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a module's buffers by all their names, but for sparse and expanded ones."""
    return {
        name: value.detach() for name, value in model.named_buffers(remove_duplicate=False) if has_own_elements(value)
    }


def layout_of(buffers: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the shape and the type of each buffer."""
    return {name: (value.shape, value.dtype) for name, value in buffers.items()}
