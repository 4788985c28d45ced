"""The task of a model for its users. Only models of the same task are comparable."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from flyte_ddp.core.models.sidecar import Sidecar

REORDERED = ("classification", "multilabel", "segmentation")  # objectives with outputs [N, K, ...] for K classes


@dataclass(frozen=True)
class Task:
    """The facts of a model that its users depend on, and that comparable models share."""

    objective: str
    objective_options: Mapping[str, Any]
    target_shape: list[int]
    classes: list[str]
    positive_class: str  # the second of two classes if a measure or threshold depends on which is second, else ""
    # Rows are described by the names of the columns, in any order. Other inputs are described by shape, because the
    # mean differs between data sets.
    input: str

    @classmethod
    def from_sidecar(cls, sidecar: Sidecar) -> "Task":
        rows = sidecar.preprocessing.rows
        return cls(
            objective=sidecar.objective,
            objective_options=sidecar.options.get("objective", {}),
            target_shape=sidecar.target_shape or [],
            classes=sidecar.classes,
            positive_class=name_positive_class(sidecar),
            input=sidecar.input.describe() if not rows else f"rows of {', '.join(sorted(rows))}",
        )

    def list_changes(self, before: "Task") -> list[str]:
        """Return the names of the fields that differ from the task ``before``, for people."""
        names = (field.name for field in fields(self))
        return [name.replace("_", " ") for name in names if getattr(self, name) != getattr(before, name)]


def name_positive_class(sidecar: Sidecar) -> str:
    """Return the name of the positive class, or "" if no class is positive.

    With two classes, the second class is positive if the main measure or a threshold depends on the order of the
    classes.
    """
    depends = sidecar.hyperparameters.get("select_by") in ("f1", "average_precision") or sidecar.threshold is not None
    return sidecar.classes[1] if depends and len(sidecar.classes) == 2 else ""


def has_same_preprocessing(one: Sidecar, other: Sidecar) -> bool:
    """Return whether two models have equal preprocessing, or preprocessing that was fitted to equal data.

    Equal data count, because pickles of equal objects may differ, for instance of sets of texts.
    """
    fits = [sidecar.preprocessing.sha256 for sidecar in (one, other)]
    return bool(fits[0] == fits[1] or one.digests.data == other.digests.data != "")


def can_be_reordered(challenger: Task, champion: Task) -> bool:
    """Return whether the champion's outputs can be reordered to the challenger's order of the classes.

    Both tasks must have the same classes, perhaps in the same order, and no positive class. The objective must be
    classification, multilabel or segmentation.
    """
    if challenger.objective not in REORDERED or challenger.positive_class or champion.positive_class:
        return False
    return sorted(challenger.classes) == sorted(champion.classes)
