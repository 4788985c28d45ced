"""Tests of two models on the same samples, and what they can find.

``gained`` are the samples that only the first model gets right, ``lost`` those that only the second one does.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

BOOTSTRAP_DRAWS = 2000
BOOTSTRAP_VALUES = 20_000_000  # in memory at a time
POWER = 0.8
SIMULATED = 10_000

Floats = NDArray[np.float64]
Counts = NDArray[np.integer[Any]]


def spent(alpha: float, look: int) -> float:
    """Return the share of ``alpha`` for the ``look``-th test, from 1, on the same samples; all sum up to ``alpha``.

    With it, false alarms over all looks together stay below ``alpha`` (Bonferroni's bound, by the sum of 1 / k^2).
    """
    return alpha * 6 / (math.pi * look) ** 2


def better(gained: int, lost: int) -> float:
    """Return the p-value of McNemar's exact test, one-sided; 1 if no sample tells the models apart.

    McNemar, "Note on the sampling error of the difference between correlated proportions", Psychometrika 12 (1947).
    """
    return float(stats.binomtest(gained, gained + lost, 0.5, alternative="greater").pvalue) if gained + lost else 1.0


def above_share(correct: int, samples: int, share: float) -> float:
    """Return the p-value of the binomial test, one-sided, that more than ``share`` of the samples are correct."""
    return float(stats.binomtest(correct, samples, share, alternative="greater").pvalue)


def score(gained: Counts, lost: Counts, samples: int, difference: float) -> Floats:
    """Return Tango's statistic of a difference in accuracy, first minus second model: standard normal if it is true.

    Tango, "Equivalence test and confidence interval for the difference in proportions for the paired-sample design",
    Statistics in Medicine 17 (1998).
    """
    linear = (2 * samples - gained + lost) * difference - gained - lost
    root = np.sqrt(np.maximum(0.0, linear**2 + 8 * samples * lost * difference * (1 - difference)))
    share = np.maximum(0.0, (root - linear) / (4 * samples))  # that would be lost if this were the true difference
    variance = samples * (2 * share + difference * (1 - difference))
    return np.asarray((gained - lost - samples * difference) / np.sqrt(np.maximum(variance, 1e-300)))


def least_difference(gained: int, lost: int, samples: int, alpha: float) -> float:
    """Return the lower bound of the difference in accuracy at confidence 1 - ``alpha``, by inverting Tango's test."""
    wanted, lowest, highest = stats.norm.isf(alpha), -1 + 1e-12, (gained - lost) / samples - 1e-12

    def excess(difference: float) -> float:
        return float(score(np.array(gained), np.array(lost), samples, difference) - wanted)

    if highest <= lowest or excess(lowest) <= 0:
        return -1.0
    return float(optimize.brentq(excess, lowest, highest)) if excess(highest) < 0 else highest


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values, corrected for their number: Holm, Scandinavian Journal of Statistics 6 (1979)."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


def least_mean(values: Floats, alpha: float) -> float:
    """Return the lower bound of a mean at the confidence 1 - ``alpha``, by a studentised bootstrap, the same each time.

    Efron and Tibshirani, "An introduction to the bootstrap" (1993), section 12.5. Percentiles of the means themselves
    would miss the truth more often where a few values are far from the others, as those of likelihoods are.

    Args:
        values: [N], of each sample the difference between two models.
    """
    mean, error = float(values.mean()), float(values.std())
    if error <= 1e-12 * abs(mean):
        return mean
    random, batch = np.random.default_rng(0), max(1, BOOTSTRAP_VALUES // len(values))
    found: list[Floats] = []
    for start in range(0, BOOTSTRAP_DRAWS, batch):
        drawn = values[random.integers(len(values), size=(min(batch, BOOTSTRAP_DRAWS - start), len(values)))]
        spread = np.maximum(drawn.std(axis=1), 1e-9 * error)  # of few values all that are drawn may be the same
        found.append((drawn.mean(axis=1) - mean) / spread)
    bound = mean - error * float(np.quantile(np.concatenate(found), 1 - alpha))
    return max(bound, float(values.min()))


def detectable(samples: int, discordant: float, alpha: float) -> float | None:
    """Return the true difference in accuracy that McNemar's test finds with a probability of POWER, or None.

    Args:
        discordant: the share of samples that only one of the models gets right.

    Exactly, by summing over how many samples tell the models apart, and how many of these are gained.
    """

    def missing(difference: float) -> float:
        share = max(discordant, difference)
        low, high = stats.binom.interval(1 - 1e-9, samples, share)
        apart = np.arange(int(low), int(high) + 1)
        needed = stats.binom.isf(alpha, apart, 0.5)  # more gains than these
        found = stats.binom.sf(needed, apart, (share + difference) / (2 * share))
        return float((stats.binom.pmf(apart, samples, share) * found).sum()) - POWER

    return float(optimize.brentq(missing, 1e-9, 1.0, xtol=1e-6)) if missing(1.0) > 0 else None


def passing(samples: int, discordant: float, margin: float, alpha: float) -> float:
    """Return how often a model of the same accuracy is found not worse by a margin; simulated, the same each time.

    Args:
        discordant: the share of samples that only one of the models gets right.
    """
    random = np.random.default_rng(0)
    apart = random.binomial(samples, discordant, size=SIMULATED)
    gained = random.binomial(apart, 0.5)
    passed = score(gained, apart - gained, samples, -margin) > stats.norm.isf(alpha)
    return float((passed & (apart > 0)).mean())  # a model that gets the same samples right is kept


def calibration_error(confidence: NDArray[np.float64], correct: NDArray[np.bool_], bins: int = 15) -> float:
    """Return the mean distance of confidence and accuracy, over bins of equal width, weighted by their samples.

    Guo et al., "On calibration of modern neural networks", ICML 2017.

    Args:
        confidence: [N], the probability that the model gives to its prediction.
        correct: [N].
    """
    places = np.minimum((confidence * bins).astype(np.int64), bins - 1)
    apart = np.bincount(places, confidence - correct, minlength=bins)
    return float(np.abs(apart).sum() / len(confidence))
