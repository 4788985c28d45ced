"""Tests of two models on the same samples: McNemar's and Tango's for scores of 0 and 1, otherwise sign flips."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from flyte_ddp.core.text.formatting import format_count
from flyte_ddp.release.sign_flip import lower_bound_by_sign_flips, sign_flip_p_value

BOOTSTRAP_DRAWS = 2000  # of which 100 lie beyond a bound at alpha 0.05
BOOTSTRAP_VALUES = 20_000_000  # drawn values in memory at a time

Floats = NDArray[np.float64]
POINTS, SHARES, NUMBERS = "points", "shares", "numbers"


@dataclass(frozen=True, eq=False)
class ScoreDifferences:
    """The differences of two models' scores on the same samples.

    For scores of 0 and 1, only the numbers of samples gained and lost matter.
    """

    values: Floats  # [N], the challenger's score minus the other model's
    measure: str  # the name of the scores, in words
    unit: str  # POINTS for 0/1 scores, SHARES of the other model's mean loss, or NUMBERS
    countable: bool = True  # whether better and worse samples can be counted; False for pseudo-values

    @property
    def samples(self) -> int:
        return len(self.values)

    @property
    def gained(self) -> int:
        return int((self.values > 0).sum())

    @property
    def lost(self) -> int:
        return int((self.values < 0).sum())

    @property
    def difference(self) -> float:
        return float(self.values.mean())

    def describe(self) -> str:
        """Return the difference as text, such as "+1.25 points: 30 samples gained and 5 lost of 2,000".

        For scores other than 0 and 1, an example is "squared error worse by 1.25 %: 30 samples better and 50 worse of
        80". If the samples cannot be counted, an example is "squared error worse by 1.25 % on 2,000 samples".
        """
        change = self.format_difference(self.difference)
        if self.unit == POINTS:
            return f"{change}: {self.gained:,} samples gained and {self.lost:,} lost of {self.samples:,}"
        if not self.countable:
            which = "worse" if self.difference < 0 else "better"
            return f"{self.measure} {which} by {change[1:]} on {self.samples:,} samples"
        counts = f"{format_count(self.gained, 'sample')} better and {self.lost:,} worse of {self.samples:,}"
        return f"{self.measure} {'worse' if self.difference < 0 else 'better'} by {change[1:]}: {counts}"

    def format_difference(self, difference: float) -> str:
        """Return a difference as text in its unit: 0.0125 becomes +1.25 points, +1.25 % or +0.0125."""
        if self.unit == NUMBERS:
            return f"{difference:+.4f}"
        return f"{100 * difference:+.2f} {'points' if self.unit == POINTS else '%'}"

    def p_value_of_gain(self) -> float:
        """Return the one-sided p-value for a challenger better than the other model.

        The test is McNemar's exact test (Psychometrika 12, 1947) for scores of 0 and 1, otherwise the sign-flip test.
        """
        if self.unit == POINTS and (differing := self.gained + self.lost):
            return float(stats.binomtest(self.gained, differing, 0.5, alternative="greater").pvalue)
        return sign_flip_p_value(self.values)

    def p_value_of_loss(self) -> float:
        return ScoreDifferences(-self.values, self.measure, self.unit).p_value_of_gain()

    def lower_bound(self, alpha: float) -> float:
        """Return the lower 1 - ``alpha`` confidence bound of the mean difference, or -inf for too few samples.

        For scores of 0 and 1 the bound is Tango's. Otherwise the bound is the smaller of a sign-flip test's bound and a
        bootstrap's bound.
        """
        if self.unit == POINTS:
            return tango_lower_bound(self.gained, self.lost, self.samples, alpha)
        by_flips = lower_bound_by_sign_flips(self.values, alpha)
        return min(by_flips, bootstrap_lower_bound(self.values, alpha))


def compare_scores(
    mine: NDArray[Any], theirs: NDArray[Any], measure: str, *, is_loss: bool = False, countable: bool = True
) -> ScoreDifferences:
    """Return the comparison of two models' scores [N] of the same samples.

    Args:
        mine: The scores of the model that should be better.
        theirs: The scores of the other model.
        measure: The name of the scores, in words.
        is_loss: Whether the scores are losses times -1. Differences are then shares of the mean of ``theirs``, unless
            the mean is 0.
        countable: Whether a sample with a higher score has a better answer. False for pseudo-values.
    """
    if not is_loss and all(np.isin(scores, (0, 1)).all() for scores in (mine, theirs)):
        return ScoreDifferences(np.subtract(mine, theirs, dtype=np.float64), measure, POINTS)
    unit = abs(float(theirs.mean())) if is_loss else 0.0
    return ScoreDifferences((mine - theirs) / (unit or 1.0), measure, SHARES if unit > 0 else NUMBERS, countable)


def alpha_of_look(alpha: float, look: int) -> float:
    """Return the significance level of the judgement with the number ``look`` on a test split, from 1.

    The levels of all judgements sum up to ``alpha`` (Bonferroni's bound).
    """
    return alpha * 6 / (math.pi * look) ** 2


def tango_lower_bound(gained: int, lost: int, samples: int, alpha: float) -> float:
    """Return the lower 1 - ``alpha`` confidence bound of the difference in accuracy by Tango's test, at least -1.

    Source: Tango, "Equivalence test and confidence interval for the difference in proportions for the paired-sample
    design", Statistics in Medicine 17 (1998).
    """
    wanted, lowest, highest = float(stats.norm.isf(alpha)), -1 + 1e-12, (gained - lost) / samples - 1e-12

    def excess_of_statistic(difference: float) -> float:
        """Return Tango's statistic, standard normal if ``difference`` is true, minus ``wanted``."""
        linear = (2 * samples - gained + lost) * difference - gained - lost
        root = math.sqrt(max(0.0, linear**2 + 8 * samples * lost * difference * (1 - difference)))
        share = max(0.0, (root - linear) / (4 * samples))  # that would be lost if this were the true difference
        variance = samples * (2 * share + difference * (1 - difference))
        return (gained - lost - samples * difference) / math.sqrt(max(variance, 1e-300)) - wanted

    if highest <= lowest or excess_of_statistic(lowest) <= 0:
        return -1.0
    return float(optimize.brentq(excess_of_statistic, lowest, highest)) if excess_of_statistic(highest) < 0 else highest


def correct_p_values(p_values: Sequence[float]) -> list[float]:
    """Return p-values in the same order, corrected by Holm's method (Scandinavian Journal of Statistics 6, 1979)."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


def bootstrap_lower_bound(values: Floats, alpha: float) -> float:
    """Return the lower 1 - ``alpha`` confidence bound of the mean of ``values`` [N], at least the smallest value.

    Uses a studentised bootstrap with a fixed seed (Efron and Tibshirani, "An introduction to the bootstrap", 1993,
    12.5). If all values are equal, returns the mean.
    """
    mean, error = float(values.mean()), float(values.std())
    if error <= 1e-12 * abs(mean):
        return mean
    random, batch = np.random.default_rng(0), max(1, BOOTSTRAP_VALUES // len(values))
    found: list[Floats] = []
    for start in range(0, BOOTSTRAP_DRAWS, batch):
        drawn = values[random.integers(len(values), size=(min(batch, BOOTSTRAP_DRAWS - start), len(values)))]
        spread = np.maximum(drawn.std(axis=1), 1e-9 * error)  # with few values, all drawn values may be equal
        found.append((drawn.mean(axis=1) - mean) / spread)
    bound = mean - error * float(np.quantile(np.concatenate(found), 1 - alpha))
    return max(bound, float(values.min()))
