"""Checks of targets and outputs, for the built-in objectives."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flyte_ddp.core.errors import UserError


def check_target_type(name: str, targets: NDArray[Any], dimensions: Sequence[int], kinds: str, rule: str) -> None:
    """Raise UserError if the targets have another type or number of dimensions than allowed.

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


def check_target_values(name: str, targets: NDArray[Any], are_right: Callable[[NDArray[Any]], Any], rule: str) -> None:
    """Raise UserError if a target has a value that is not allowed. The error names the row.

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


def check_output_shape(model: str, outputs: object, expected: tuple[int, ...], axes: str, fix: str) -> None:
    """Raise UserError unless the outputs are a tensor of shape ``expected``.

    Args:
        model: Name of the model, for the error.
        outputs: The model's outputs.
        expected: The shape.
        axes: Names the dimensions in the error, such as "(samples, classes)".
        fix: Says in the error how to correct the model, if a tensor has another shape.
    """
    if isinstance(outputs, Tensor):
        got = str(tuple(outputs.shape))
    else:
        name = "logits" if "classes" in axes else "outputs"
        got, fix = type(outputs).__name__, f"return only the {name}"
    if got != str(expected):
        raise UserError(f"model {model!r} returned {got}: must return a tensor of shape {axes} = {expected}; {fix}")
