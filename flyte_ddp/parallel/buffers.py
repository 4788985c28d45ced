"""What forward passes change of a model: buffers, and perhaps parameters that the optimiser leaves alone.

Each rank would change its own. As with DDP, those of rank 0 count: the others copy them after each step. So all ranks
continue alike, what is evaluated is what is saved, and rank 0's checkpoint is complete.
"""

from __future__ import annotations

import copy
import inspect
import operator
import pickle
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flyte_ddp.errors import UserError
from flyte_ddp.parallel.batch_norm import GlobalBatchNorm
from flyte_ddp.parallel.distributed import from_rank_0, objects_of_all_ranks, rank, world_size
from flyte_ddp.parallel.node_memory import NodeGather
from flyte_ddp.parallel.training_pass import TrainingPass

Mark = tuple[object, ...]
OF_TORCH = vars(nn.Module()).keys()


class Buffers:
    """The buffers of a model in training. Those of BatchNorm, which has rules of its own, are only kept.

    ``changing`` are the names of the others that forward passes change; it is the same on all ranks. ``late`` says that
    one was found after the first step of the run, so that the ranks had their own for a while. ``attributes`` are those
    of modules that passes change although no file holds them: numbers, tensors, generators, and objects that have
    such; each rank has its own.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.marks_of_attributes: dict[str, Mark] = {}
        self.begin()
        self.frozen = {name for name, value in model.named_parameters() if not value.requires_grad}
        self.shapes = shapes_of(model.state_dict())
        self.unsaved = {
            name: value if value is None else value.detach().clone()
            for name, value in registered_in(model).items()
            if name not in self.shapes
        }
        self.changing: list[str] = []
        self.attributes: list[str] = []
        self.late = False
        self.looked = False
        self.after_step: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Remembers what there is before the next forward pass."""
        watched = {**watched_in(self.model), **dict(self.model.named_parameters())}
        self.marks = {name: mark(value) for name, value in watched.items()}
        self.attributes_at_first = attribute_marks(self.model)

    def passes_done(self, step: int) -> None:
        """Takes over rank 0's after the passes of a step, the ``step``-th of the run from 0; all ranks call it."""
        if self.looked:
            self.share()
        else:
            self.look(first=step == 0)

    def look(self, *, first: bool = False) -> None:
        """Finds out what else changes, and takes over rank 0's; all ranks call it, after a step or before evaluating.

        Args:
            first: no more than the first step of the run has been done.

        Raises:
            UserError: a parameter that was frozen is so no longer, and the optimiser does not know it.
        """
        thawed = [name for name, value in self.model.named_parameters() if value.requires_grad and name in self.frozen]
        if thawed:
            raise UserError(
                f"parameter {thawed[0]}: was frozen when the optimiser was made, which never trains it; leave its "
                "requires_grad True, and multiply its gradient by 0 (register_hook) until it is to be trained"
            )
        watched = watched_in(self.model)
        if first:  # before the optimiser: a layer may set its weights by the first batch it sees
            watched |= dict(self.model.named_parameters())
        changed = {name for name, value in watched.items() if mark(value) != self.marks.get(name)}
        changed |= {name for name, value in registered_in(self.model).items() if value is None and name in self.marks}
        of_ranks = objects_of_all_ranks((changed, *self.look_at_attributes()))
        found = {name for names, _, _ in of_ranks for name in names} - {*self.changing}
        self.late = self.late or (bool(found) and not first)
        self.changing = sorted({*self.changing, *found})
        first_set = [entries for _, _, entries in of_ranks]
        unequal = {name for name in set().union(*first_set) if len({entries.get(name) for entries in first_set}) > 1}
        self.attributes = sorted({*self.attributes, *unequal}.union(*(names for _, names, _ in of_ranks)))
        self.looked = True
        self.share()

    def look_at_attributes(self) -> tuple[set[str], dict[str, Mark]]:
        """Names of those that passes change, and the marks of those that the first passes, since :meth:`begin`, set.

        The latter may be no more than remembered, such as a mask: but not if another rank, or the run before it was cut
        off, has set something else.
        """
        before, now = self.marks_of_attributes, attribute_marks(self.model)
        self.marks_of_attributes = now
        if self.looked:
            return {name for name in now if now[name] != before.get(name)}, {}
        first = {name: now[name] for name in now if now[name] != self.attributes_at_first.get(name)}
        return {name for name in first if before and first[name] != before.get(name)}, first

    def share(self, model: nn.Module | None = None) -> None:
        """Overwrites what changes, of the model or of its average, by what rank 0 has."""
        model = model or self.model
        if self.changing and world_size() > 1:
            own = {**watched_in(model), **dict(model.named_parameters())} if rank() == 0 else {}
            values = from_rank_0({name: own[name].detach().cpu() for name in self.changing if name in own})
            if rank() != 0:
                overwrite(model, values)

    def unlike_new(self) -> list[str]:
        """What a new model's ``state_dict`` lacks, has in another shape, or has in addition."""
        now = shapes_of(self.model.state_dict())
        return [name for name in self.changing if now.get(name) != self.shapes.get(name)]

    def keep(self) -> None:
        """Remembers on rank 0, which saves, what they are after a step, because the next forward pass changes them."""
        if rank() != 0:
            return
        watched = watched_in(self.model) if self.changing else {}
        changing = {name: watched[name] for name in self.changing if name in watched}
        # With all names of what modules share, as in the model's state_dict.
        values = dict(self.model.named_buffers(remove_duplicate=False)) | changing
        frozen = {id(value) for value in changing.values()}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if id(parameter) in frozen:
                values[name] = parameter
        kept = {}
        for name, value in values.items():
            old = self.after_step.get(name)
            if old is not None and (old.shape, old.dtype) == (value.shape, value.dtype):
                kept[name] = old.copy_(value.detach())
            else:
                kept[name] = value.detach().clone()
        self.after_step = kept

    def after_step_in(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the model's ``state_dict``, with its ``_metadata``, as it was after a step."""
        as_it_was = copy.copy(state_dict)
        as_it_was.update({name: self.after_step[name] for name in state_dict if name in self.after_step})
        return as_it_was

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, beside the ``state_dict`` of the model."""
        return {
            "changing": self.changing,
            "late": self.late,
            "attributes": self.attributes,
            "values": {name: self.after_step[name] for name in self.changing if name in self.after_step},
            "marks_of_attributes": self.marks_of_attributes,
        }

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module, saved: Collection[str]) -> None:
        """Continues where :meth:`state_dict` was called; gives the model, or its average, what changes.

        Args:
            saved: names in the model's ``state_dict``.
        """
        given_up = dict.fromkeys(shapes_of(model.state_dict()).keys() - saved)
        self.changing = sorted({*state["changing"], *given_up})
        self.late, self.attributes = state["late"], state["attributes"]
        self.marks_of_attributes = state["marks_of_attributes"]
        overwrite(model, {**given_up, **state["values"]}, saved)

    def restore(self, model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
        """Gives the model, or its average, what it had earlier, when buffers may not have been there yet."""
        for name in shapes_of(model.state_dict()).keys() - state_dict.keys():
            delattr(*place_of(model, name))
        overwrite(model, {name: state_dict[name] for name in self.changing if name in state_dict})
        model.load_state_dict(state_dict)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Undoes what forward and backward passes change, but for BatchNorm over all ranks."""
        with put_back(self.model, self.changing, but_for=GlobalBatchNorm):
            yield

    @contextmanager
    def as_saved(self, model: nn.Module) -> Iterator[None]:
        """Has the model, or its average, be what it would be if it were saved and loaded; puts back what it was."""
        with put_back(model, self.changing):
            saved = model.state_dict().keys()
            overwrite(model, {name: value for name, value in self.unsaved.items() if name not in saved})
            yield


def watched_in(model: nn.Module) -> dict[str, Tensor]:
    """Names and values of all that may turn out to be changed: buffers, and parameters that are frozen."""
    frozen = {name: value for name, value in model.named_parameters() if not value.requires_grad}
    return buffers_of(model) | frozen


def buffers_of(model: nn.Module, but_for: type[nn.Module] = _BatchNorm) -> dict[str, Tensor]:
    """Names and values of the buffers of all modules but those of a kind."""
    return {name: value for name, value in registered_in(model, but_for).items() if value is not None}


def registered_in(model: nn.Module, but_for: type[nn.Module] = _BatchNorm) -> dict[str, Tensor | None]:
    """The same with those that are None so far."""
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, module in model.named_modules()
        if not isinstance(module, but_for)
        for name, value in module._buffers.items()
    }


def attribute_marks(model: nn.Module) -> dict[str, Mark]:
    """Marks of modules' attributes; without those that cannot be pickled, which is how their content is found."""
    found: dict[str, Mark] = {}
    parts = {id(part) for part in (*model.modules(), *model.parameters())}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in OF_TORCH:
                try:
                    content = Content(parts)
                    content.dump(value)
                except Exception:  # noqa: S112 (a class's own code runs here)
                    continue
                found[f"{prefix}.{name}" if prefix else name] = (content.crc,)
    return found


class Content(pickle.Pickler):
    """Takes the checksum of an object. It does not look into the model's parts, code, and results to differentiate."""

    def __init__(self, parts: Collection[int]) -> None:
        """``parts``: the ``id`` of each module and parameter that torch knows to be the model's."""
        self.crc, self.parts = 0, parts
        super().__init__(self)

    def write(self, data: bytes) -> int:
        """What a pickler writes into."""
        self.crc = zlib.crc32(data, self.crc)
        return len(data)

    def persistent_id(self, value: object) -> object:
        """What stands for an object that is not looked into."""
        if isinstance(value, Tensor):
            of_others = isinstance(value, nn.Parameter) and id(value) not in self.parts
            return ("tensor", *(map(str, mark(value)) if of_others or not value.requires_grad else ()))
        if isinstance(value, torch.Generator):
            return ("generator", bytes(value.get_state().tolist()))
        opaque = isinstance(value, (type, TrainingPass, NodeGather)) or inspect.isroutine(value)
        return "opaque" if opaque or id(value) in self.parts else None


def shapes_of(state_dict: Mapping[str, object]) -> dict[str, torch.Size]:
    """Those of the tensors, without a module's extra state."""
    return {name: value.shape for name, value in state_dict.items() if isinstance(value, Tensor)}


def mark(value: Tensor) -> Mark:
    """What tells a tensor from what it was before, without keeping a copy."""
    if value.layout != torch.strided:
        return (value.shape,)
    # A copy, because what NumPy has looked into cannot be resized any more.
    content = value.detach().to("cpu", copy=True).resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return value.shape, value.dtype, zlib.crc32(content.numpy().data)


@torch.no_grad()
def overwrite(model: nn.Module, values: Mapping[str, Tensor | None], saved: Collection[str] = ()) -> None:
    """Gives a model these buffers, in place where that can be.

    Args:
        saved: which of the ones that it lacks are to be in its ``state_dict``.
    """
    device = next(model.parameters()).device
    for name, value in values.items():
        module, own_name = place_of(model, name)
        old = getattr(module, own_name, None)
        if value is None:
            setattr(module, own_name, None)
        elif isinstance(old, Tensor) and (old.shape, old.dtype) == (value.shape, value.dtype) and writable(old):
            old.detach().copy_(value)
        elif isinstance(old, nn.Parameter):
            old.data = value.to(device, copy=True)
        elif hasattr(module, own_name):
            setattr(module, own_name, value.to(device, copy=True))
        else:
            module.register_buffer(own_name, value.to(device, copy=True), persistent=name in saved)


@contextmanager
def put_back(model: nn.Module, changing: Collection[str], but_for: type[nn.Module] = _BatchNorm) -> Iterator[None]:
    """At the end the model has the buffers again that it has now, and no others, with what they hold now.

    Args:
        changing: names of parameters, of which the same is true.
        but_for: a kind of module whose buffers are left alone.
    """
    # What torch.jit has made keeps the buffers it has.
    kinds = (but_for, torch.jit.ScriptModule)
    modules = [module for module in model.modules() if not isinstance(module, kinds)]
    registered = [(module, dict(module._buffers), {*module._non_persistent_buffers_set}) for module in modules]
    frozen = {name: value for name, value in model.named_parameters() if name in changing}
    before = {
        name: value.detach().clone() for name, value in (buffers_of(model, but_for) | frozen).items() if writable(value)
    }
    try:
        yield
    finally:
        for module, buffers, unsaved in registered:
            module._buffers.clear()
            module._buffers.update(buffers)
            module._non_persistent_buffers_set = unsaved
        overwrite(model, before)


def place_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has a buffer, and its name there."""
    prefix, _, own_name = name.rpartition(".")
    return operator.attrgetter(prefix)(model) if prefix else model, own_name  # get_submodule refuses scripted ones


def writable(value: Tensor) -> bool:
    """Whether each element has a place of its own, unlike those of a sparse or an expanded tensor."""
    return value.layout == torch.strided and all(
        stride > 0 or size < 2 for size, stride in zip(value.shape, value.stride(), strict=True)
    )
