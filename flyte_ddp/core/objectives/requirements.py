"""Checks of losses, weights, targets and outputs."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyte_ddp.core.errors import UserError


def require_losses(losses: Any, weights: Tensor | None, samples: int) -> None:
    """Raise UserError unless losses are a tensor with a single number, or of the shape of the weights.

    Without weights (None), the shape must be [samples].
    """
    if not isinstance(losses, Tensor):
        raise UserError(f"the objective's losses are a {type(losses).__name__}: must be a tensor of losses")
    shape = torch.Size([samples]) if weights is None else weights.shape
    if losses.dim() and losses.shape != shape:
        rule = f"{list(shape)}, " + ("one for each sample" if weights is None else "like the weights")
        fix = "do not reduce them"
        if tuple(losses.shape) == (samples, samples):
            fix = "outputs [n, 1] and targets [n] broadcast to a table: use outputs[:, 0]"
        raise UserError(f"the objective's losses have shape {list(losses.shape)}: must be {rule}; {fix}")


def require_weights(weights: Tensor | None, samples: int) -> None:
    """Raise UserError unless weights are finite, at least 0, and have a row for each of the samples. Accepts None."""
    if weights is None:
        return
    if weights.shape[:1] != (samples,):
        raise UserError(
            f"the objective's weights have shape {list(weights.shape)}: must have one or more weights for each of the "
            f"{samples} samples; do not reduce the weights"
        )
    if not bool(((weights >= 0) & weights.isfinite()).all()):
        raise UserError(
            f"the objective's weights range from {weights.min().item():g} to {weights.max().item():g}: must be finite "
            "and at least 0; 0 excludes a loss"
        )


def require_targets(name: str, targets: NDArray[Any], dimensions: Sequence[int], kinds: str, rule: str) -> None:
    """Raise UserError unless number of dimensions and type of the targets are allowed.

    Args:
        name: Name of the objective, for the error.
        targets: All targets of a split, or of a batch.
        dimensions: Allowed numbers of dimensions.
        kinds: Allowed letters of NumPy's ``dtype.kind``.
        rule: Says in the error what targets must be.
    """
    if targets.ndim not in dimensions or targets.dtype.kind not in kinds:
        raise UserError(
            f"objective={name!r}: the targets are {targets.dtype} {list(targets.shape)}: must be {rule}; convert the "
            "targets, or choose another objective"
        )


def require_values(name: str, targets: NDArray[Any], are_right: Callable[[NDArray[Any]], Any], rule: str) -> None:
    """Raise UserError for the first wrong target. The error names its row.

    Args:
        name: Name of the objective, for the error.
        targets: All targets of a split, or of a batch.
        are_right: Gets up to 1,000 rows, and returns for each element whether it is right.
        rule: Says in the error what targets must be.
    """
    for start in range(0, len(targets), 1000):
        part = targets[start : start + 1000]
        for row, *place in np.argwhere(~are_right(part))[:1].tolist():
            where = f" of row {start + row}" * (len(targets) > 1) + f" at {place}" * bool(place)
            found = format(part[(row, *place)], "g" if part.dtype.kind == "f" else "")
            raise UserError(f"objective={name!r}: the target{where} is {found}: must be {rule}")


def require_outputs(model: str, outputs: object, expected: tuple[int, ...], axes: str, fix: str) -> None:
    """Raise UserError unless the outputs are a tensor of shape ``expected``.

    Args:
        model: Name of the model, for the error.
        outputs: The model's outputs.
        expected: The shape.
        axes: Names the dimensions in the error, such as "(samples, classes)".
        fix: Says in the error how to correct the model.
    """
    if isinstance(outputs, Tensor):
        got = str(tuple(outputs.shape))
    else:
        name = "logits" if "classes" in axes else "outputs"
        got, fix = type(outputs).__name__, f"return only the {name}"
    if got != str(expected):
        raise UserError(f"model {model!r} returned {got}: must return a tensor of shape {axes} = {expected}; {fix}")
