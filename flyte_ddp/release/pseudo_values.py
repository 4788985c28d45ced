"""Leave-one-out pseudo-values: a measure of a whole split, such as AUROC, as one number for each sample.

The pseudo-value of a sample is N times the measure minus N - 1 times the measure without the sample (Tukey, "Bias and
confidence in not-quite large samples", Annals of Mathematical Statistics 29, 1958). Of a mean of N scores these are the
scores; of others their mean is the measure up to order 1 / N. A sample without which a label's measure is not defined
does not change it.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyte_ddp.errors import UserError

MOST_CALLS = 20_000  # samples for which a measure is called without each of them

Floats = NDArray[np.float64]


def compute_pseudo_values(measures: Floats, without: Floats) -> Floats:
    """Return pseudo-values [N, K] from K ``measures`` and those ``without`` each sample [N, K]; NaN: not defined."""
    samples = len(without)
    return np.asarray(samples * measures - (samples - 1) * np.where(np.isnan(without), measures, without))


def pseudo_values_of_ratios(numerators: Floats, denominators: Floats, members: Floats | None = None) -> Floats:
    """Return the pseudo-values [N, K] of K sums of ``numerators`` [N, K] over sums of ``denominators`` [N, K].

    A ratio, such as F1 or IoU, is defined where the sum of ``members`` [N, K] (default: the denominators) is not 0.
    """
    above, below = numerators.sum(axis=0), denominators.sum(axis=0)
    members = denominators if members is None else members
    left = members.sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        measures = np.where(left > 0, above / below, np.nan)
        without = np.where(left - members > 0, (above - numerators) / (below - denominators), np.nan)
    return compute_pseudo_values(measures, without)


def pseudo_values_of_auroc(scores: Floats, targets: Floats) -> Floats:
    """Return the pseudo-values [N, K] of each label's area under the ROC curve; NaN without samples of both kinds.

    ``scores`` [N, K] are higher where a label is likelier; ``targets`` [N, K] are 1, 0 or NaN (unknown: no influence).
    """
    areas, without = np.full(scores.shape[1], np.nan), np.full(scores.shape, np.nan)
    for label in range(scores.shape[1]):
        positive, negative = targets[:, label] == 1, targets[:, label] == 0
        ours, theirs = scores[positive, label], scores[negative, label]
        if not len(ours) or not len(theirs):
            continue
        above, below = share_below(ours, theirs), 1 - share_below(theirs, ours)
        areas[label] = above.mean()
        without[:, label] = areas[label]
        for members, shares in ((positive, above), (negative, below)):
            if len(shares) > 1:
                without[members, label] = (shares.sum() - shares) / (len(shares) - 1)
    return compute_pseudo_values(areas, without)


def pseudo_values_of_average_precision(scores: Floats, targets: Floats) -> Floats:
    """Return the pseudo-values [N, K] of each label's average precision; arguments as for the AUROC."""
    areas, without = np.full(scores.shape[1], np.nan), np.full(scores.shape, np.nan)
    for label in range(scores.shape[1]):
        positive, known = targets[:, label] == 1, ~np.isnan(targets[:, label])
        every, ours = np.sort(scores[known, label]), np.sort(scores[positive, label])
        if not len(ours):
            continue
        # Of each positive sample, how many positive and how many known samples have at least its score.
        right, above = (len(each) - np.searchsorted(each, ours, "left") for each in (ours, every))
        fewer = np.maximum(above - 1, 1)
        areas[label] = (right / above).mean()
        without[:, label] = areas[label]
        # Leaving out a sample changes the precisions at its score and below, which are first in the order.
        sums = [np.append(0.0, np.cumsum(each)) for each in (right / above, (right - 1) / fewer, right / fewer)]
        for members, changed, left in ((positive, sums[1], len(ours) - 1), (known & ~positive, sums[2], len(ours))):
            places = np.searchsorted(ours, scores[members, label], "right")
            total = sums[0][-1] - sums[0][places] + changed[places]
            if left < len(ours):
                total = total - np.diff(sums[1])[places - 1]  # its own precision
            without[members, label] = total / left if left else np.nan
    return compute_pseudo_values(areas, without)


def share_below(values: Floats, others: Floats) -> Floats:
    """Return for each of ``values`` [n] the share of ``others`` [m] that are less; equal ones count half."""
    others = np.sort(others)
    places = np.searchsorted(others, values, "left") + np.searchsorted(others, values, "right")
    return np.asarray(places / (2 * len(others)))


def pseudo_values_by_calls(measure: Callable[[Mapping[str, Tensor]], float], columns: Mapping[str, Tensor]) -> Floats:
    """Return the pseudo-values [N] of any measure of columns [N, ...] by N + 1 calls, with copies of N - 1 rows."""
    samples = len(next(iter(columns.values())))
    refuse_many_calls(samples)
    without = [
        measure({name: torch.cat((column[:sample], column[sample + 1 :])) for name, column in columns.items()})
        for sample in range(samples)
    ]
    return compute_pseudo_values(np.array([measure(columns)]), np.array(without)[:, None])[:, 0]


def refuse_many_calls(samples: int) -> None:
    """Raise a UserError for more than MOST_CALLS (20,000) samples."""
    if samples > MOST_CALLS:
        raise UserError(
            f"the objective's main measure is no mean of scores, and {samples:,} samples are more than {MOST_CALLS:,} "
            "to leave out one at a time; give it a method scores(columns) that returns a number for each sample"
        )
