"""Tests of two models on the same samples, and what they can find.

``gained`` are the samples that only the first model gets right, ``lost`` those that only the second one does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

BOOTSTRAP_DRAWS = 2000
BOOTSTRAP_VALUES = 20_000_000  # in memory at a time
POWER = 0.8


def spent(alpha: float, look: int) -> float:
    """The share of ``alpha`` for the ``look``-th test (from 1) on the same samples; all shares sum up to ``alpha``.

    With it, false alarms over all looks together stay below ``alpha`` (Bonferroni's bound, by the sum of 1 / k^2).
    """
    return alpha * 6 / (math.pi * look) ** 2


def better(gained: int, lost: int) -> float:
    """McNemar's exact test, one-sided: the probability of so many gains if both models were equally good.

    McNemar, "Note on the sampling error of the difference between correlated proportions", Psychometrika 12 (1947); 1
    if no sample tells the models apart.
    """
    return float(stats.binomtest(gained, gained + lost, 0.5, alternative="greater").pvalue) if gained + lost else 1.0


def above_share(correct: int, samples: int, share: float) -> float:
    """The binomial test, one-sided: the probability of so many correct ones if ``share`` of all were to be expected."""
    return float(stats.binomtest(correct, samples, share, alternative="greater").pvalue)


def least_difference(gained: int, lost: int, samples: int, alpha: float) -> float:
    """The lower bound of the difference in accuracy, first minus second model, at the confidence 1 - ``alpha``.

    By inverting the score test: Tango, "Equivalence test and confidence interval for the difference in proportions for
    the paired-sample design", Statistics in Medicine 17 (1998).
    """
    observed, wanted = (gained - lost) / samples, stats.norm.isf(alpha)

    def excess(difference: float) -> float:
        linear = (2 * samples - gained + lost) * difference - gained - lost
        root = math.sqrt(max(0.0, linear**2 + 8 * samples * lost * difference * (1 - difference)))
        share = max(0.0, (root - linear) / (4 * samples))  # that would be lost if this were the true difference
        variance = samples * (2 * share + difference * (1 - difference))
        return float((gained - lost - samples * difference) / math.sqrt(max(variance, 1e-300)) - wanted)

    if observed <= -1:
        return -1.0
    return float(optimize.brentq(excess, -1 + 1e-12, observed - 1e-12)) if excess(-1 + 1e-12) > 0 else -1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values, corrected for there being so many: Holm, Scandinavian Journal of Statistics 6 (1979)."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


def least_mean(values: NDArray[np.float64], alpha: float) -> float:
    """The lower bound of a mean at the confidence 1 - ``alpha``: percentiles of a bootstrap, the same each time.

    Args:
        values: [N], of each sample the difference between two models.
    """
    if np.ptp(values) == 0:
        return float(values[0])
    batch = max(1, BOOTSTRAP_VALUES // len(values))
    found = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=BOOTSTRAP_DRAWS,
        batch=batch,
        confidence_level=1 - alpha,
        alternative="greater",
        method="percentile",
        rng=np.random.default_rng(0),
    )
    return float(found.confidence_interval.low)


def detectable(samples: int, discordant: float, alpha: float) -> float:
    """The true difference in accuracy that the test finds with a probability of 80 %; 1 if there is none so large.

    Args:
        discordant: the share of samples that only one of the models gets right.

    By the normal approximation to McNemar's test: Connor, "Sample size for testing differences in proportions for the
    paired-sample design", Biometrics 43 (1987).
    """
    at_null, at_power = float(stats.norm.isf(alpha)), float(stats.norm.ppf(POWER))

    def missing(difference: float) -> float:
        share = max(discordant, difference)
        spread = at_null * math.sqrt(share) + at_power * math.sqrt(max(0.0, share - difference**2))
        return difference * math.sqrt(samples) - spread

    return float(optimize.brentq(missing, 1e-12, 1.0)) if missing(1.0) > 0 else 1.0


def passing(samples: int, discordant: float, margin: float, alpha: float) -> float:
    """How often a model of the same accuracy is found to be not worse by a margin.

    Args:
        discordant: the share of samples that only one of the models gets right.

    By the normal approximation to the test, as above.
    """
    if not discordant:
        return 1.0
    return float(stats.norm.cdf(margin * math.sqrt(samples / discordant) - stats.norm.isf(alpha)))


def calibration_error(confidence: NDArray[np.float64], correct: NDArray[np.bool_], bins: int = 15) -> float:
    """How far confidence and accuracy are apart, over bins of equal width and weighted by their samples.

    Guo et al., "On calibration of modern neural networks", ICML 2017.

    Args:
        confidence: [N], the probability that the model gives to its prediction.
        correct: [N].
    """
    places = np.minimum((confidence * bins).astype(np.int64), bins - 1)
    apart = np.bincount(places, confidence - correct, minlength=bins)
    return float(np.abs(apart).sum() / len(confidence))
