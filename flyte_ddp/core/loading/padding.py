"""Types, padding values and masks of batches."""

import torch
from torch import Tensor

from flyte_ddp.core.samples.leaves import IGNORED_TOKEN, Leaves, get_leaves_form

MASK = "mask"  # name of the leaf that says where a padded input has values


def widen_type(values: Tensor) -> Tensor:
    """Convert whole numbers to int64 and floats to fp32, and return the tensor. Truth values are not converted."""
    if values.is_floating_point():
        return values.float()
    return values if values.dtype == torch.bool else values.long()


def choose_padding_value(dtype_kind: str, kind: str) -> float | int | bool:
    """Return the value that fills up the shorter samples of a padded leaf.

    Inputs get 0. Targets get -100 (whole numbers) or NaN (floats), which objectives ignore, or False. ``dtype_kind`` is
    the letter of NumPy's ``dtype.kind`` ("f", "i" or "b"), and ``kind`` is "inputs" or "targets".
    """
    return 0 if kind == "inputs" else {"b": False, "f": float("nan")}.get(dtype_kind, IGNORED_TOKEN)


def add_mask(inputs: Leaves, mask: Tensor) -> Leaves:
    """Return inputs with the mask as an additional leaf.

    In a tuple, the mask is last. A single leaf becomes a tuple of leaf and mask. In a dict, the mask has the key
    ``mask``. A dict that already has this key is returned without the mask.
    """
    if get_leaves_form(inputs) == "dict":
        return {MASK: mask, **inputs}
    return (*inputs, mask) if get_leaves_form(inputs) == "tuple" else (inputs, mask)
