"""Refuse hyperparameters that are well-formed and cannot be trained with: a UserError with the value and the fix."""

import dataclasses
import math
from collections.abc import Collection

from flyte_ddp import catalog
from flyte_ddp.checks.fields import CheckedFields, short_repr
from flyte_ddp.errors import UserError


def refuse_unused_settings(hyperparameters: CheckedFields, objective: str, used: Collection[str]) -> None:
    """Raise UserError for a setting of other objectives that is not at its default and not among those ``used``."""
    some_use = {name for names in catalog.SETTINGS_OF_OBJECTIVES.values() for name in names}
    for field in dataclasses.fields(hyperparameters):  # type: ignore[arg-type]
        value = getattr(hyperparameters, field.name)
        if field.name in some_use and field.name not in used and value != field.default:
            raise UserError(
                f"{field.name}={short_repr(value)}: objective={objective!r} has no use for it; leave it out, or "
                "choose another objective"
            )


def check_class_weights(text: str) -> None:
    """Raise UserError unless ``text`` is empty, "balanced", or finite numbers >= 0, not all 0, separated by commas."""
    if text in ("", "balanced"):
        return
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        weights = [-1.0]
    if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        raise UserError(
            f"class_weights={short_repr(text)}: must be balanced, or numbers of at least 0 separated by commas, not "
            "all 0"
        )


def refuse_own_code_of_torch(hyperparameters: CheckedFields) -> None:
    for field in dataclasses.fields(hyperparameters):  # type: ignore[arg-type]
        value = getattr(hyperparameters, field.name)
        if field.metadata["own"] and ":" in value and value.partition(":")[0].partition(".")[0] == "torch":
            raise UserError(
                f"{field.name}={value!r}: is torch's own, and is called in another way here; write a function of your "
                "own that returns it, or what it computes, and name that (docs/own-code.md)"
            )


def check_batch_size(batch_size: int, accumulation_steps: int, num_ranks: int) -> None:
    if batch_size < num_ranks * accumulation_steps:
        raise UserError(
            f"batch_size={batch_size}: must be at least ranks x accumulation_steps = "
            f"{num_ranks} x {accumulation_steps}; raise batch_size, or lower num_ranks or accumulation_steps"
        )
