"""Make a batch out of single samples: leaves are stacked, or padded to the longest."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyte_ddp.errors import UserError
from flyte_ddp.leaves import Leaves, form_of, name_leaves, restore_leaves

STACKED, PADDED = "stacked", "padded"  # values of the hyperparameter ``collate``
MASK = "mask"  # name of the leaf that says where a padded input has values
IGNORED_TOKEN = -100  # fills padded targets that are whole numbers; torch's cross-entropy ignores it by default

Samples = Sequence[tuple[Leaves, Leaves]]


def stack_samples(samples: Samples, names: Sequence[str]) -> tuple[Leaves, Leaves]:
    """Return inputs and targets of samples as one batch: each leaf a tensor [n, ...].

    ``names`` are the samples' names in errors. Raises UserError for leaves of different shapes, and those of
    :func:`convert_leaf`.
    """

    def stack(name: str, leaves: Sequence[NDArray[Any]], kind: str) -> Tensor:
        """Return a leaf of all samples as one tensor."""
        shape = leaves[0].shape
        for sample, leaf in zip(names, leaves, strict=True):
            if leaf.shape != shape:
                raise UserError(
                    f"{describe_leaf(kind, name)} of {sample} have shape {list(leaf.shape)}, and of {names[0]} "
                    f"{list(shape)}; set collate='padded', or a function of your own"
                )
        return widen(torch.from_numpy(np.stack(leaves)))

    inputs, targets = (combine(stack, [sample[side] for sample in samples], side, names) for side in (0, 1))
    return inputs, targets


def pad_samples(samples: Samples, names: Sequence[str]) -> tuple[Leaves, Leaves]:
    """Return inputs and targets of samples as one batch: leaves with a first dimension are padded at their ends.

    Inputs are padded with 0, targets as :func:`padding_of` says. :func:`add_mask` adds the mask, bool [n, longest], of
    the first such input: where it has values. ``names`` are the samples' names in errors, which are those of
    :func:`stack_samples` for other dimensions than the first.
    """
    masks = list[Tensor]()

    def pad(name: str, leaves: Sequence[NDArray[Any]], kind: str) -> Tensor:
        """Return a leaf of all samples as one tensor, padded to the longest."""
        if not leaves[0].ndim:
            return widen(torch.from_numpy(np.stack(leaves)))
        for sample, leaf in zip(names, leaves, strict=True):
            if leaf.shape[1:] != leaves[0].shape[1:]:
                raise UserError(
                    f"{describe_leaf(kind, name)} of {sample} have shape {list(leaf.shape)}, and of {names[0]} "
                    f"{list(leaves[0].shape)}: only the first dimension may differ; set a collate of your own"
                )
        lengths = torch.tensor([len(leaf) for leaf in leaves])
        longest = int(lengths.max())
        dtype = widen(torch.from_numpy(leaves[0][:0])).dtype
        filled = torch.full((len(leaves), longest, *leaves[0].shape[1:]), padding_of(dtype, kind), dtype=dtype)
        for row, leaf in zip(filled, leaves, strict=True):
            row[: len(leaf)] = torch.from_numpy(leaf)
        if kind == "inputs":
            masks.append(torch.arange(longest) < lengths[:, None])
        return filled

    inputs, targets = (combine(pad, [sample[side] for sample in samples], side, names) for side in (0, 1))
    return add_mask(inputs, masks[0]) if masks else inputs, targets


def combine(function: Any, leaves: Sequence[Leaves], side: int, names: Sequence[str]) -> Leaves:
    """Return leaves of the first sample's form, each made by ``function`` out of that leaf of all samples.

    ``side`` is 0 for inputs and 1 for targets. Raises UserError if a sample has other leaves than the first.
    """
    kind, first = ("inputs", "targets")[side], leaves[0]
    named = [name_leaves(each) for each in leaves]
    expected = named[0].keys()
    for sample, each in zip(names, named, strict=True):
        if each.keys() != expected:
            raise UserError(
                f"the {kind} of {sample} have the leaves {', '.join(each) or 'none'}, and those of {names[0]} "
                f"{', '.join(named[0]) or 'none'}; all must have the same"
            )
    made = dict[str, Tensor]()
    for name in named[0]:
        arrays = [convert_leaf(kind, each[name], sample) for each, sample in zip(named, names, strict=True)]
        made[name] = function(name, arrays, kind)
    return restore_leaves(form_of(first), made)


def convert_leaf(kind: str, leaf: Any, sample: str) -> NDArray[Any]:
    """Return a leaf of a sample as an array of truth values, whole numbers or floats; UserError for anything else."""
    try:
        array = np.asarray(leaf)
    except (TypeError, ValueError) as error:
        raise UserError(f"the {kind} of {sample} are no array: {error}") from None
    if array.dtype.kind not in "biuf":
        what = {"O": "objects", "U": "texts", "S": "bytes"}.get(array.dtype.kind, str(array.dtype))
        raise UserError(
            f"the {kind} of {sample} are {what}: must be numbers or truth values; convert them, or set a collate of "
            "your own"
        )
    return array


def describe_leaf(kind: str, name: str) -> str:
    """Return a leaf in words, such as "the inputs" or "the inputs 'tokens'"."""
    return f"the {kind} {name!r}" if name else f"the {kind}"


def widen(values: Tensor) -> Tensor:
    """Return whole numbers as int64, floats as fp32, and truth values unchanged."""
    if values.is_floating_point():
        return values.float()
    return values if values.dtype == torch.bool else values.long()


def padding_of(dtype: torch.dtype, kind: str) -> float | int | bool:
    """Return what fills up a padded leaf: 0 for inputs; for targets, which must not count, -100, NaN or False."""
    if kind == "inputs" or dtype == torch.bool:
        return 0
    return float("nan") if dtype.is_floating_point else IGNORED_TOKEN


def add_mask(inputs: Leaves, mask: Tensor) -> Leaves:
    """Return inputs with the mask as one more leaf: the last of a tuple, or ``mask`` of a dict, unless it has one."""
    if form_of(inputs) == "dict":
        return {MASK: mask, **inputs}
    return (*inputs, mask) if form_of(inputs) == "tuple" else (inputs, mask)
