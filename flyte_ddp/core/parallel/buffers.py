"""Keep the registered buffers of a model equal on all ranks: as with DDP, rank 0's values are used.

State that ``forward`` changes must be a registered buffer, which has the final shape when the model is built.
BatchNorm's buffers follow other rules (batch_norm.py).
"""

import copy
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.parallel.distributed import copy_from_rank_0, has_separate_elements, rank, world_size
from flyte_ddp.core.parallel.node_memory import compute_aligned_sizes, split_memory


class SavedBuffers(TypedDict):
    """The state of Buffers in a checkpoint."""

    unsaved: dict[str, Tensor]  # buffers that the model's state_dict omits
    changed: list[str]  # names of buffers


class Buffers:
    """The registered buffers of a model in training, by all names, except sparse and expanded buffers."""

    def __init__(self, model: nn.Module) -> None:
        """Copy the model's buffers, and prepare their exchange between ranks.

        Keeps the names, shapes and types, which must not change later.
        """
        self.model = model
        values = get_copyable_buffers(model)
        self.layout = get_shapes_and_dtypes(values)
        modules = model.named_modules(remove_duplicate=False)
        norms = {prefix for prefix, module in modules if isinstance(module, _BatchNorm)}
        self.shared_names = [name for name in values if name.rpartition(".")[0] not in norms]  # not BatchNorm's
        saved = model.state_dict().keys()
        self.unsaved_names = [name for name in self.shared_names if name not in saved]  # persistent=False
        self.initial = {name: values[name].clone() for name in self.shared_names}
        self.changed_before_resume: set[str] = set()  # names of buffers
        self.after_last_step = {name: value.clone() for name, value in values.items()}
        self.found = dict(model.named_buffers(remove_duplicate=False))  # what copy_buffers_after_step checked last
        # All shared buffers are copied into one tensor of bytes, with a view for each: one broadcast, one comparison.
        shared = [values[name] for name in self.shared_names] if world_size() > 1 else []
        pieces = [(value.numel(), value.dtype) for value in shared]
        device = next(model.parameters()).device
        self.bytes = torch.zeros(sum(compute_aligned_sizes(pieces)), dtype=torch.uint8, device=device)
        flats = split_memory(self.bytes, pieces)
        self.views = [flat.view(value.shape) for value, flat in zip(shared, flats, strict=True)]
        self.last_broadcast = torch.zeros_like(self.bytes)  # the bytes that all ranks had after the last broadcast

    def require_same_buffer_layout(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the buffers of ``model`` by name, if they have the same names, shapes and types as at the start.

        Values are not compared. Sparse and expanded buffers are skipped.

        Args:
            model: The model of this object, or the moving average of the model.

        Raises:
            UserError: A buffer was added or removed since this object was made, or has another shape or type.
        """
        values = get_copyable_buffers(model)
        if (layout := get_shapes_and_dtypes(values)) != self.layout:
            first = min(name for name in layout | self.layout if layout.get(name) != self.layout.get(name))
            raise UserError(
                f"buffer {first}: was registered, removed or resized after the model was made; register the buffer in "
                "the model's constructor with its final shape and type, or use a plain attribute if the value need "
                "not be saved"
            )
        return values

    @torch.no_grad()
    def stage_buffers_for_broadcast(self) -> bool:
        """Copy the model's shared buffers into the memory of the next broadcast, and return whether they have changed.

        Compares with the last broadcast, bit by bit. On one rank returns False. On a GPU returns True without a
        comparison. All buffers except BatchNorm's are shared.

        Raises:
            UserError: A buffer was added, removed or resized.
        """
        values = self.require_same_buffer_layout(self.model)
        if not self.views:
            return False
        torch._foreach_copy_(self.views, [values[name] for name in self.shared_names])
        # Compares bits: numbers would be wrong for NaN and -0.0, and autograd's version counters miss ``buffer.data``.
        as_int64 = self.bytes.view(torch.int64), self.last_broadcast.view(torch.int64)
        return not (self.bytes.is_cpu and torch.equal(*as_int64))

    @torch.no_grad()
    def broadcast_staged_buffers(self, ranks_with_changes: Tensor) -> None:
        """Set the shared buffers of all ranks' models to the values that rank 0 has staged. Collective.

        Call :meth:`stage_buffers_for_broadcast` first. On CPUs, does nothing if ``ranks_with_changes`` is 0.

        Args:
            ranks_with_changes: On how many ranks :meth:`stage_buffers_for_broadcast` has returned True.
        """
        if not self.views or (self.bytes.is_cpu and not ranks_with_changes):
            return
        copy_from_rank_0([self.bytes])
        self.last_broadcast.copy_(self.bytes)
        if rank() != 0:
            values = get_copyable_buffers(self.model)
            for name, view in zip(self.shared_names, self.views, strict=True):
                values[name].copy_(view)  # not by _foreach_copy_, which cannot write to conjugate views

    @torch.no_grad()
    def copy_buffers_after_step(self) -> None:
        """Copy the model's buffers to ``after_last_step``, from which checkpoints are written.

        Raises:
            UserError: A buffer was added, removed or resized.
        """
        if not self.after_last_step:
            return
        found = dict(self.model.named_buffers(remove_duplicate=False))
        # require_same_buffer_layout takes twice as long as this comparison, and most models never replace a buffer.
        same = found.keys() == self.found.keys() and all(map(operator.is_, found.values(), self.found.values()))
        if not same or any((found[name].shape, found[name].dtype) != each for name, each in self.layout.items()):
            self.require_same_buffer_layout(self.model)
            self.found = found
        torch._foreach_copy_([*self.after_last_step.values()], [found[name] for name in self.after_last_step])

    def state_dict_after_step(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a shallow copy of the model's ``state_dict`` with the buffers that were copied after the last step."""
        result = copy.copy(state_dict)
        result.update({name: self.after_last_step[name] for name in state_dict if name in self.after_last_step})
        return result

    def list_changed_buffers(self) -> list[str]:
        """Return the sorted names of the buffers, except BatchNorm's, that have changed since the start of the run.

        Changes before a resume count, too.
        """
        pairs = {name: (self.after_last_step[name], self.initial[name]) for name in self.shared_names}
        now = {name for name, (new, old) in pairs.items() if not ((new == old) | new.isnan() & old.isnan()).all()}
        return sorted(self.changed_before_resume | now)

    def state_dict(self) -> SavedBuffers:
        """Return the buffers that the model's ``state_dict`` omits ("unsaved"), and the names of changed buffers."""
        unsaved = {name: self.after_last_step[name] for name in self.unsaved_names}
        return {"unsaved": unsaved, "changed": self.list_changed_buffers()}

    @torch.no_grad()
    def load_state_dict(self, state: SavedBuffers) -> None:
        """Restore the result of :meth:`state_dict`, and set the model's buffers that its ``state_dict`` omits.

        Call the model's ``load_state_dict`` first.

        Raises:
            UserError: A buffer was added, removed or resized.
        """
        values = self.require_same_buffer_layout(self.model)
        for name in self.shared_names:
            if name in state["unsaved"]:
                values[name].copy_(state["unsaved"][name])
            else:
                self.initial[name].copy_(values[name])  # list_changed_buffers compares with this value from now on
        self.changed_before_resume = {*state["changed"]}
        self.copy_buffers_after_step()

    @contextmanager
    @torch.no_grad()  # not in the block
    def use_saved_buffers(self, model: nn.Module) -> Iterator[None]:
        """Set the buffers that ``state_dict`` omits to their initial values for the block, as after loading a file.

        After the block, restores all buffers except BatchNorm's. If a buffer was added, removed or resized in the
        block, nothing is restored.

        Raises:
            UserError: A buffer was added, removed or resized, before or in the block.
        """
        values = self.require_same_buffer_layout(model)
        before = {name: values[name].clone() for name in self.shared_names}
        for name in self.unsaved_names:
            values[name].copy_(self.initial[name])
        try:
            yield
            self.require_same_buffer_layout(model)  # not in ``finally``, where it would hide an exception of the block
        finally:
            values = get_copyable_buffers(model)
            if get_shapes_and_dtypes(values) == self.layout:
                for name in self.shared_names:
                    values[name].copy_(before[name])


def get_copyable_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return a module's buffers by name, except sparse and expanded buffers.

    A buffer with several names is listed under each name.
    """
    named = model.named_buffers(remove_duplicate=False)
    return {name: value.detach() for name, value in named if has_separate_elements(value)}


def get_shapes_and_dtypes(buffers: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in buffers.items()}
