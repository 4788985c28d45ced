"""Measures and curves of labels that a model predicts by a probability. Measures equal scikit-learn's."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.text.sections import Curve

MEASURES = ("f1", "auroc", "average_precision", "balanced_accuracy")
CURVE_POINTS = 300  # more cannot be distinguished in a chart
MOST_CURVES = 8  # labels with a chart

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class BinaryLabels(NamedTuple):
    """K labels of N samples, [N, K]: truth (1, 0, or NaN for unknown), probabilities, and predictions."""

    truth: Floats
    scores: Floats
    predicted: Bools

    def iterate_known_labels(self) -> Iterator[tuple[Bools, Floats, Bools]]:
        """Yield each label's truth, probabilities and predictions for the samples whose truth is known."""
        for truth, scores, predicted in zip(self.truth.T, self.scores.T, self.predicted.T, strict=True):
            known = ~np.isnan(truth)
            yield truth[known] == 1, scores[known], predicted[known]

    def measure(self) -> list[dict[str, float]]:
        return [measure_label(*known) for known in self.iterate_known_labels()]

    def draw_curves(self, names: Sequence[str]) -> list[Curve]:
        """Return the ROC curve and the precision-recall curve of each label, for the report's charts.

        Skips labels without positive or without negative samples, and labels after the first 8 (MOST_CURVES). ``names``
        are the names of the labels.
        """
        known = [(name, *found[:2]) for name, found in zip(names, self.iterate_known_labels(), strict=True)]
        drawn = [label for label in known if label[1].any() and not label[1].all()][:MOST_CURVES]
        return [curve for label in drawn for curve in compute_label_curves(*label)]


def count_at_or_above(truth: Bools, scores: Floats) -> tuple[Floats, NDArray[Any], NDArray[Any]]:
    """Count the positives and the negatives with a score at or above each score.

    ``truth`` is True for positives. There must be at least one sample.

    Returns:
        The distinct scores in descending order, and for each score the number of positives and of negatives.
    """
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
    right = np.cumsum(truth[order])[last]
    return ranked[last], right, last + 1 - right


def measure_label(truth: Bools, scores: Floats, predicted: Bools) -> dict[str, float]:
    """Return the F1, AUROC, average precision and balanced accuracy of a label, by name.

    Without positives, all measures are NaN. Without negatives, AUROC and balanced accuracy are NaN.

    Args:
        truth: Whether each sample has the label.
        scores: Probability of the label.
        predicted: Whether the label is predicted.
    """
    positives, negatives = int(truth.sum()), int((~truth).sum())
    if not positives:
        return dict.fromkeys(MEASURES, float("nan"))
    hits = int((truth & predicted).sum())
    _, right, wrong = count_at_or_above(truth, scores)
    gained = np.diff(right, prepend=0)
    area = (np.diff(wrong, prepend=0) * (2 * right - gained)).sum() / (2 * positives * max(1, negatives))
    specificity = int((~truth & ~predicted).sum()) / max(1, negatives)
    return {
        "f1": 2 * hits / (int(predicted.sum()) + positives),
        "auroc": float(area) if negatives else float("nan"),
        "average_precision": float((gained / positives * (right / (right + wrong))).sum()),
        "balanced_accuracy": (hits / positives + specificity) / 2 if negatives else float("nan"),
    }


def compute_label_curves(name: str, truth: Bools, scores: Floats) -> tuple[Curve, Curve]:
    """Return the ROC curve and the precision-recall curve of a label, at 300 thresholds at most.

    The label must have positives and negatives. ``name`` is part of the charts' names, unless empty.
    """
    _, right, wrong = count_at_or_above(truth, scores)
    recall, alarms, precision = right / right[-1], wrong / wrong[-1], right / (right + wrong)
    # At equal steps of the sum, which rises from 0 to 2 along the ROC curve.
    places = np.unique(np.searchsorted(recall + alarms, np.linspace(0, 2, CURVE_POINTS)).clip(max=len(right) - 1))
    x, y, precisions = (values[places].tolist() for values in (alarms, recall, precision))
    title, text = "Curves", "Each point is a threshold, on the test samples. Grey: uninformative probabilities."
    axes, share = ("false positive rate", "true positive rate"), float(truth.mean())
    roc, precision = (f"{name}: {kind}" if name else kind for kind in ("ROC curve", "Precision-recall curve"))
    return (
        Curve(title, text, roc, *axes, [0.0, *x], [0.0, *y], (0.0, 1.0)),
        Curve(title, text, precision, "recall", "precision", y, precisions, (share, share)),
    )
