"""Combine single samples into a batch: leaves are stacked, or padded to the longest."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.loading.padding import add_mask, choose_padding_value
from flyte_ddp.core.samples.leaves import (
    Leaves,
    convert_to_array,
    get_leaves_form,
    group_leaves,
    require_numbers,
    restore_leaves,
)

STACKED, PADDED = "stacked", "padded"  # values of the hyperparameter ``collate``
SIDES = ("inputs", "targets")

Samples = Sequence[tuple[Leaves, Leaves]]
Types = Mapping[tuple[str, str], np.dtype[Any]]  # by "inputs" or "targets", and the leaf's name


def collate_samples(
    samples: Samples, names: Sequence[str], *, padded: bool, masked: str | None, types: Types | None = None
) -> tuple[Leaves, Leaves]:
    """Stack or pad the leaves of samples to a batch, and return the batch's inputs and targets as tensors.

    Whole numbers become int64, and floats fp32. Truth values stay.

    Args:
        samples: Pairs of inputs and targets.
        names: Names of the samples, for errors.
        padded: Whether leaves are padded along dimension 0 to the longest sample of the batch. If False, all samples of
            a leaf must have one shape.
        masked: Name of a padded input, for which a mask is added to the inputs: bool [n, longest], True at values.
        types: Type of each leaf in the whole data set. Without ``types``, a type depends on the samples of this batch.

    Raises:
        UserError: The forms, names or shapes of the samples' leaves differ. Or a leaf is no array of numbers, or has
            values that its type in ``types`` cannot hold.
    """
    masks = list[Tensor]()

    def join_leaf(name: str, leaves: Sequence[NDArray[Any]], kind: str) -> Tensor:
        """Return the leaf ``name`` of all samples as one tensor. The mask of a ``masked`` leaf goes into ``masks``."""
        dtype, shape = (types or {}).get((kind, name)) or choose_wide_type(leaves), leaves[0].shape
        for sample, leaf in zip(names, leaves, strict=True):
            if leaf.ndim != len(shape) or leaf.shape[padded:] != shape[padded:]:  # padded: all but the first dimension
                what = f"the {kind} {name!r}" if name else f"the {kind}"
                fix = "only the first dimension may differ; set a user-defined collate"
                fix = fix if padded else "set collate='padded', or a user-defined function"
                found = f"of {sample} have shape {list(leaf.shape)}, and those of {names[0]} {list(shape)}"
                raise UserError(f"{what} {found}: {fix}")
            check_conversion_is_exact(f"the {kind} of {sample}", leaf, dtype)
        if not padded or not shape:
            return torch.from_numpy(np.stack(leaves).astype(dtype))
        lengths = np.array([len(leaf) for leaf in leaves])
        filled = np.full((len(leaves), lengths.max(), *shape[1:]), choose_padding_value(dtype.kind, kind), dtype)
        for row, leaf in zip(filled, leaves, strict=True):
            row[: len(leaf)] = leaf
        if (kind, name) == ("inputs", masked):
            masks.append(torch.from_numpy(np.arange(lengths.max()) < lengths[:, np.newaxis]))
        return torch.from_numpy(filled)

    def join_leaves(kind: str, leaves: Sequence[Leaves]) -> Leaves:
        """Return the inputs or the targets (``kind``) of all samples, with each leaf as one tensor."""
        joined = dict[str, Tensor]()
        for name, values in group_leaves(kind, leaves, names).items():
            arrays = list[NDArray[Any]]()
            for leaf, sample in zip(values, names, strict=True):
                arrays.append(convert_to_array(f"the {kind} of {sample}", leaf))
                require_numbers(
                    f"the {kind} of {sample}", arrays[-1], "convert the values, or set a user-defined collate"
                )
            joined[name] = join_leaf(name, arrays, kind)
        return restore_leaves(get_leaves_form(leaves[0]), joined)

    inputs, targets = (join_leaves(kind, side) for kind, side in zip(SIDES, zip(*samples, strict=True), strict=True))
    return add_mask(inputs, masks[0]) if masks else inputs, targets


def choose_wide_type(leaves: Sequence[NDArray[Any]]) -> np.dtype[Any]:
    """Return the type of a leaf in a batch: fp32 if any sample has floats, int64, or bool if all are truth values."""
    # Ignores empty leaves: NumPy makes floats of an empty list, which would make floats of all leaves.
    kinds = {leaf.dtype.kind for leaf in leaves if leaf.size} or {leaves[0].dtype.kind}
    return np.dtype(np.float32 if "f" in kinds else np.bool_ if kinds == {"b"} else np.int64)


def check_conversion_is_exact(what: str, values: NDArray[Any], dtype: np.dtype[Any]) -> None:
    """Raise UserError if a conversion of ``values`` to ``dtype`` would change a value. ``what`` begins the error."""
    always_same = dtype.kind == "f" or values.dtype.kind == "b" or (dtype.kind == "i" and values.dtype.kind in "iu")
    if not always_same and values.size and not (values == values.astype(dtype)).all():
        found, known = {"f": "fractions"}.get(values.dtype.kind, "numbers"), {"b": "truth values"}.get(dtype.kind)
        problem = f"have {found}, but the first examined samples have {known or 'whole numbers'}"
        raise UserError(f"{what} {problem}; give all samples one type, such as np.float32(values)")
