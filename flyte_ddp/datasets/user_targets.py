"""Properties of the targets that user-defined functions make."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.loading.split import TargetSpec
from flyte_ddp.core.samples.leaves import IGNORED


def require_target(own: object, target: NDArray[Any], kind: TargetSpec, where: str) -> NDArray[Any]:
    """Check that the shape, type and class numbers of a target fit ``kind``, and return the target unchanged.

    Floats fit only if ``kind`` has a float type. Ignored pixels (255) of a mask always fit.

    Args:
        own: The callable that made the target, for errors.
        kind: Properties that all targets share.
        where: Names the sample in errors.

    Raises:
        UserError: The target does not fit.
    """
    allowed = "biuf" if kind.dtype.kind == "f" else "biu"
    if target.shape != kind.shape or target.dtype.kind not in allowed:
        rule = f"must be {kind.dtype} {list(kind.shape)}, like the targets of other samples"
        raise UserError(f"{own} returned {target.dtype} {list(target.shape)} as the target of {where}: {rule}")
    if kind.classes and kind.dtype.kind != "f" and (target.min() < 0 or target.max() >= kind.classes):
        wrong = target[(target < 0) | (target >= kind.classes)]
        wrong = wrong[wrong != IGNORED] if target.ndim else wrong
        if len(wrong):
            rule = f"must be 0..{kind.classes - 1} with {kind.classes} classes"
            if target.ndim:
                rule += f", or {IGNORED} for ignored pixels"
            raise UserError(f"{own} returned {wrong[0]} as the target of {where}: {rule}")
    return target


def derive_target_spec(own: object, target: NDArray[Any], classes: int, where: str) -> TargetSpec:
    """Derive shape and type of all targets from a single ``target``.

    A whole number is a class, int64 []. Whole numbers [H, W, ...] are a mask, uint8 or int64. Other targets, such as
    whole numbers [k], are float32.

    Args:
        own: The callable that made the target, for errors.
        classes: Number of classes, or 0 if unknown. Only for classes and masks.
        where: Names the sample in errors.

    Raises:
        UserError: The target is neither a number nor an array of numbers.
    """
    if target.dtype.kind not in "biuf":
        rule = "must be a number, or an array of numbers"
        raise UserError(f"{own} returned {target.dtype} as the target of {where}: {rule}")
    whole = target.dtype.kind in "biu" and target.ndim != 1
    if target.ndim > 1 and target.dtype == np.uint8:
        return TargetSpec(target.dtype, target.shape, classes)
    return TargetSpec(np.dtype(np.int64 if whole else np.float32), target.shape, classes if whole else 0)
