"""Statistical tests of two models on the same samples."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

BOOTSTRAP_DRAWS = 2000  # of which 100 lie beyond a bound at alpha 0.05
BOOTSTRAP_VALUES = 20_000_000  # drawn values in memory at a time

Floats = NDArray[np.float64]
Counts = NDArray[np.integer[Any]]


def alpha_of_look(alpha: float, look: int) -> float:
    """Return the level of the test number ``look``, from 1; the levels sum up to ``alpha`` (Bonferroni's bound)."""
    return alpha * 6 / (math.pi * look) ** 2


def mcnemar_p_value(gained: int, lost: int) -> float:
    """Return the one-sided p-value of McNemar's exact test that the first of two models is better; 1 if none differs.

    Only the first model gets ``gained`` samples right, only the second one ``lost``. McNemar, Psychometrika 12 (1947).
    """
    return binomial_p_value(gained, gained + lost, 0.5) if gained + lost else 1.0


def binomial_p_value(correct: int, samples: int, share: float) -> float:
    """Return the one-sided p-value of the binomial test that a model is right in more than ``share`` of all cases."""
    return float(stats.binomtest(correct, samples, share, alternative="greater").pvalue)


def tango_statistic(gained: Counts, lost: Counts, samples: int, difference: float) -> Floats:
    """Return Tango's statistic, standard normal if ``difference`` (in accuracy, first minus second model) is true.

    Counts may be arrays of one shape. Tango, "Equivalence test and confidence interval for the difference in
    proportions for the paired-sample design", Statistics in Medicine 17 (1998).
    """
    linear = (2 * samples - gained + lost) * difference - gained - lost
    root = np.sqrt(np.maximum(0.0, linear**2 + 8 * samples * lost * difference * (1 - difference)))
    share = np.maximum(0.0, (root - linear) / (4 * samples))  # that would be lost if this were the true difference
    variance = samples * (2 * share + difference * (1 - difference))
    return np.asarray((gained - lost - samples * difference) / np.sqrt(np.maximum(variance, 1e-300)))


def lower_bound_of_difference(gained: int, lost: int, samples: int, alpha: float) -> float:
    """Return the lower 1 - ``alpha`` confidence bound of the difference in accuracy, at least -1, by Tango's test."""
    wanted, lowest, highest = stats.norm.isf(alpha), -1 + 1e-12, (gained - lost) / samples - 1e-12

    def excess_of_statistic(difference: float) -> float:
        return float(tango_statistic(np.array(gained), np.array(lost), samples, difference) - wanted)

    if highest <= lowest or excess_of_statistic(lowest) <= 0:
        return -1.0
    return float(optimize.brentq(excess_of_statistic, lowest, highest)) if excess_of_statistic(highest) < 0 else highest


def correct_p_values(p_values: Sequence[float]) -> list[float]:
    """Return p-values in their order, corrected by Holm's method (Scandinavian Journal of Statistics 6, 1979)."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


def lower_bound_of_mean(values: Floats, alpha: float) -> float:
    """Return the lower confidence bound, at 1 - ``alpha``, of the mean of ``values`` [N]; at least the smallest value.

    By a studentised bootstrap with a fixed seed (Efron and Tibshirani, "An introduction to the bootstrap", 1993, 12.5).
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
