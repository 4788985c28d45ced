"""The section of a page on which classes are taken for which: a picture of them, where there is room, and lists."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.confusions import confusion_matrix
from flyte_ddp.formatting import percent
from flyte_ddp.report.figures import NAMED_CLASSES, confusion_heatmap

PICTURED_CLASSES = 1000  # with more, a cell of the picture would be less than half a pixel wide on the page
LISTED, LISTED_ALONE = 8, 25  # rows of a list beside the picture, and without one


def confusion_section(counts: NDArray[np.int64], names: Sequence[str]) -> dict[str, Any]:
    """Return what the templates show of the confusions; empty if there is no sample.

    Args:
        counts: [K, 3] truth, prediction and number of samples, from :func:`flyte_ddp.confusions.count_confusions`.
        names: of all classes.

    Returns:
        ``picture`` (SVG, empty with more than PICTURED_CLASSES), whether it ``is_large``, the most frequent
        ``mistakes`` and the ``hardest`` classes.
    """
    if not len(counts):
        return {}
    classes, pictured = len(names), len(names) <= PICTURED_CLASSES
    listed = LISTED if pictured else LISTED_ALONE
    wrong, right = (counts[chosen] for chosen in (counts[:, 0] != counts[:, 1], counts[:, 0] == counts[:, 1]))
    totals, correct = (np.bincount(rows[:, 0], rows[:, 2], classes).astype(np.int64) for rows in (counts, right))
    recall = correct / np.maximum(1, totals)
    hardest = np.argsort(np.where(totals, recall, 2.0), kind="stable")[:listed].tolist()
    return {
        "picture": confusion_heatmap(confusion_matrix(counts, classes), names) if pictured else "",
        "is_large": classes > NAMED_CLASSES,
        "mistakes": [
            (names[truth], names[prediction], f"{samples:,}", percent(samples / totals[truth]))
            for truth, prediction, samples in wrong[np.argsort(-wrong[:, 2], kind="stable")[:listed]].tolist()
        ],
        "hardest": [(names[k], percent(recall[k]), f"{totals[k]:,}") for k in hardest if totals[k]],
    }
