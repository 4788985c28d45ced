"""The probability from which the second of two classes is predicted: fitted on a validation split, and applied."""

import math

import numpy as np
import torch
from torch import Tensor

from flyte_ddp.catalog import parse_threshold
from flyte_ddp.core.objectives.binary_labels import Bools, Floats, count_at_or_above
from flyte_ddp.core.objectives.objective import Objective


def fit_threshold(text: str, truth: Bools, scores: Floats) -> float:
    """Return the threshold that is best for the given samples by a rule, or the fixed probability in ``text``.

    A threshold is halfway between neighbouring scores, or between a score and 0 or 1. If thresholds are equally good,
    returns the highest. A threshold may predict no positive sample. Unless the threshold is fixed, at least one sample
    must be positive.

    Args:
        text: The hyperparameter ``threshold``: f1, recall=R, cost=C, or a fixed probability.
        truth: True for samples of the positive class.
        scores: Probability of the positive class.
    """
    rule, number = parse_threshold(text)
    if rule == "fixed":
        return number
    occurring, hits, alarms = count_at_or_above(truth, scores)
    if occurring[0] < 1:  # else each threshold up to 1 predicts a positive
        occurring, hits, alarms = np.append(1.0, occurring), np.append(0, hits), np.append(0, alarms)
    positives, predicted = hits[-1], hits + alarms
    if rule == "f1":
        good = 2 * hits / (predicted + positives)
    elif rule == "recall":
        good = np.where(hits / positives >= number, hits / np.maximum(predicted, 1), -math.inf)
    else:
        good = -(number * (positives - hits) + alarms)
    best = int(good.argmax())
    lower = np.append(occurring[1:], 0.0)[best]
    middle = (occurring[best] + lower) / 2
    return float(middle if middle > lower else occurring[best])  # neighbouring floats have nothing between them


def predict_classes(objective: Objective, logits: Tensor) -> Tensor:
    """Return the predicted class of each sample, [n]. ``logits`` have the shape [n, classes].

    With a threshold, the class is 1 if its probability is at least the threshold, else 0. Without a threshold, the
    class is the likeliest class.
    """
    threshold = objective.facts.threshold
    return logits.argmax(1) if threshold is None else apply_threshold(logits.double().softmax(1)[:, 1], threshold)


def apply_threshold(probabilities: Tensor, threshold: float) -> Tensor:
    """Return 1 where the probability is at least ``threshold``, else 0, int64."""
    return (probabilities >= threshold).to(torch.int64)
