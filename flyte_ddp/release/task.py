"""The task of a model for its users. Only models of the same task are comparable."""

from collections.abc import Mapping
from typing import Any

from flyte_ddp.datasets.preprocessing import PREPROCESSING
from flyte_ddp.text.formatting import describe_input

REORDERED = ("classification", "multilabel", "segmentation")  # objectives with outputs [N, K, ...] for K classes
POSITIVE = "positive class"  # key of a task: the second of two classes, if a measure or threshold depends on it


def read_task(sidecar: Mapping[str, Any]) -> dict[str, Any]:
    """Return the task of a model from its sidecar: the facts that users depend on, and that comparable models share.

    Rows are described by the names of the columns, in any order. Other inputs are described by shape, because the mean
    differs between data sets.
    """
    rows = sidecar.get(PREPROCESSING, {}).get("rows")
    return {
        "objective": sidecar.get("objective", "classification"),  # older sidecars name none
        "objective's options": sidecar.get("options", {}).get("objective", {}),
        "target shape": sidecar.get("target_shape", []),
        "classes": sidecar["classes"],
        POSITIVE: find_positive_class(sidecar),
        "input": describe_input(sidecar["input"]) if rows is None else f"rows of {', '.join(sorted(rows))}",
    }


def find_positive_class(sidecar: Mapping[str, Any]) -> str:
    """Return the second of two classes if the main measure or a threshold depends on which class is second, else ""."""
    select_by = sidecar.get("hyperparameters", {}).get("select_by", "")
    depends = select_by in ("f1", "average_precision") or sidecar.get("threshold") is not None
    return str(sidecar["classes"][1]) if depends and len(sidecar["classes"]) == 2 else ""


def has_same_fit(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two models have equal preprocessing, or preprocessing that was fitted to equal data.

    The arguments are the models' sidecars. The data are compared, too, because pickles of equal objects may differ, for
    instance of sets of texts.
    """
    fits = [sidecar.get(PREPROCESSING, {}).get("sha256", "") for sidecar in (one, other)]
    data = [sidecar.get("digests", {}).get("data", "") for sidecar in (one, other)]
    return bool(fits[0] == fits[1] or data[0] == data[1] != "")


def is_reordered(challenger: Mapping[str, Any], champion: Mapping[str, Any]) -> bool:
    """Return whether two tasks have the same classes in any order, and the outputs can be reordered.

    The arguments are results of :func:`read_task`. The same order also gives True. Outputs cannot be reordered if a
    task has a positive class, or if the objective is not classification, multilabel or segmentation.
    """
    if challenger["objective"] not in REORDERED or challenger[POSITIVE] or champion[POSITIVE]:
        return False
    return sorted(challenger["classes"]) == sorted(champion["classes"])
