"""Scores of two models on the same samples, compared: 0/1 by McNemar's and Tango's tests, others by sign flips."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.release import statistics
from flyte_ddp.release.sign_flip import lower_bound_by_sign_flips, sign_flip_p_value
from flyte_ddp.text.formatting import format_count

Floats = NDArray[np.float64]
POINTS, SHARES, NUMBERS = "points", "shares", "numbers"


@dataclass(frozen=True, eq=False)
class Pair:
    """Differences of two models' scores; of 0/1 scores only how many samples each model alone gets right counts."""

    differences: Floats  # [N], the challenger's score minus the other's
    measure: str  # what the scores are of, in words
    unit: str  # POINTS of 0/1 scores, SHARES of the other's mean score (of a loss), or NUMBERS

    @property
    def samples(self) -> int:
        return len(self.differences)

    @property
    def gained(self) -> int:
        return int((self.differences > 0).sum())

    @property
    def lost(self) -> int:
        return int((self.differences < 0).sum())

    @property
    def difference(self) -> float:
        return float(self.differences.mean())

    @property
    def equal(self) -> str:
        """Why nothing is decided where nothing differs."""
        right = self.unit == POINTS
        return "both models get the same samples right" if right else "both models have the same score on each sample"

    def describe(self) -> str:
        change = self.format_difference(self.difference)
        if self.unit == POINTS:
            return f"{change}: {self.gained:,} samples gained and {self.lost:,} lost of {self.samples:,}"
        counts = f"{format_count(self.gained, 'sample')} better and {self.lost:,} worse of {self.samples:,}"
        return f"{self.measure} {'worse' if self.difference < 0 else 'better'} by {change[1:]}: {counts}"

    def format_difference(self, difference: float) -> str:
        """Return a difference as text: 0.0125 as +1.25 points, +1.25 %, or +0.0125."""
        if self.unit == NUMBERS:
            return f"{difference:+.4f}"
        return f"{100 * difference:+.2f} {'points' if self.unit == POINTS else '%'}"

    def p_value(self) -> float:
        """Return the p-value of McNemar's exact test, or the exact sign-flip test, that the challenger is better."""
        if self.unit == POINTS:
            return statistics.mcnemar_p_value(self.gained, self.lost)
        return sign_flip_p_value(self.differences)

    def p_value_of_loss(self) -> float:
        return Pair(-self.differences, self.measure, self.unit).p_value()

    def lower_bound(self, alpha: float) -> float:
        """Return the lower 1 - ``alpha`` confidence bound of the difference."""
        if self.unit == POINTS:
            return statistics.lower_bound_of_difference(self.gained, self.lost, self.samples, alpha)
        by_flips = lower_bound_by_sign_flips(self.differences, alpha)
        return min(by_flips, statistics.lower_bound_of_mean(self.differences, alpha))


def compare_scores(mine: NDArray[Any], theirs: NDArray[Any], measure: str, *, is_loss: bool = False) -> Pair:
    """Return the comparison of two models' scores [N] of the same samples.

    With ``is_loss`` scores are losses times -1, and differences are shares of the mean of ``theirs``, unless that is 0.
    """
    if not is_loss and all(np.isin(scores, (0, 1)).all() for scores in (mine, theirs)):
        return Pair(np.subtract(mine, theirs, dtype=np.float64), measure, POINTS)
    unit = abs(float(theirs.mean())) if is_loss else 0.0
    return Pair((mine - theirs) / (unit or 1.0), measure, SHARES if unit > 0 else NUMBERS)
