"""Scores of two models on the same samples, compared: 0/1 by McNemar's and Tango's tests, others by sign flips."""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.formatting import format_count
from flyte_ddp.release import statistics
from flyte_ddp.release.sign_flip import lower_bound_by_sign_flips, sign_flip_p_value

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class PairedCounts:
    """Numbers of samples that only one of two models gets right: gained by the challenger, or lost by it."""

    gained: int
    lost: int
    samples: int  # all of them

    equal = "both models get the same samples right"  # why nothing is decided where nothing differs

    @classmethod
    def count(cls, mine: NDArray[np.bool_], theirs: NDArray[np.bool_]) -> Self:
        """Return the counts for two models; ``mine`` and ``theirs`` [N] say which samples each gets right."""
        return cls(int((mine & ~theirs).sum()), int((theirs & ~mine).sum()), len(mine))

    @property
    def difference(self) -> float:
        """The challenger's accuracy minus the other's, from -1 to 1."""
        return (self.gained - self.lost) / self.samples

    @property
    def differs(self) -> bool:
        return self.gained + self.lost > 0

    def describe(self) -> str:
        counts = f"{self.gained:,} samples gained and {self.lost:,} lost of {self.samples:,}"
        return f"{self.format_difference(self.difference)}: {counts}"

    def format_difference(self, difference: float) -> str:
        return f"{100 * difference:+.2f} points"

    def p_value(self) -> float:
        """Return the p-value of McNemar's exact test that the challenger is better."""
        return statistics.mcnemar_p_value(self.gained, self.lost)

    def p_value_of_loss(self) -> float:
        return statistics.mcnemar_p_value(self.lost, self.gained)

    def lower_bound(self, alpha: float) -> float:
        """Return the lower confidence bound of the difference, at 1 - ``alpha``, by Tango's test."""
        return statistics.lower_bound_of_difference(self.gained, self.lost, self.samples, alpha)

    def describe_power(self, alpha: float, margin: float | None) -> str:
        """Return a clause: which difference is found, or with a margin how often an equal model passes."""
        samples, discordant = format_count(self.samples, "sample"), (self.gained + self.lost) / self.samples
        if margin is not None:
            share = statistics.pass_probability(self.samples, discordant, margin, alpha)
            return f"on {samples} a model of the same accuracy passes a comparison in {share:.0%} of cases"
        found = statistics.detectable_difference(self.samples, discordant, alpha)
        difference = "no difference is" if found is None else f"{100 * found:.2f} points are"
        return f"on {samples} {difference} found in {statistics.POWER:.0%} of cases"


@dataclass(frozen=True, eq=False)
class PairedScores:
    """Differences of two models' scores; as shares of the other's mean score where the measure is a loss."""

    differences: Floats  # [N], the challenger's score minus the other's
    measure: str  # what the scores are of, in words
    is_share: bool

    equal = "both models have the same score on each sample"

    @property
    def samples(self) -> int:
        return len(self.differences)

    @property
    def difference(self) -> float:
        return float(self.differences.mean())

    @property
    def differs(self) -> bool:
        return bool(np.any(self.differences))

    def describe(self) -> str:
        better, worse = (int((sign * self.differences > 0).sum()) for sign in (1, -1))
        counts = f"{format_count(better, 'sample')} better and {worse:,} worse of {self.samples:,}"
        change = f"{'worse' if self.difference < 0 else 'better'} by {self.format_difference(self.difference)[1:]}"
        return f"{self.measure} {change}: {counts}"

    def format_difference(self, difference: float) -> str:
        """Return a difference as text: 0.0125 as +0.0125, or as a share +1.25 %."""
        return f"{100 * difference:+.2f} %" if self.is_share else f"{difference:+.4f}"

    def p_value(self) -> float:
        """Return the p-value of the exact sign-flip test that the challenger is better."""
        return sign_flip_p_value(self.differences)

    def p_value_of_loss(self) -> float:
        return sign_flip_p_value(-self.differences)

    def lower_bound(self, alpha: float) -> float:
        """Return the lower 1 - ``alpha`` bound of the mean difference."""
        by_flips = lower_bound_by_sign_flips(self.differences, alpha)
        return min(by_flips, statistics.lower_bound_of_mean(self.differences, alpha))

    def describe_power(self, alpha: float, margin: float | None) -> str:
        samples = format_count(self.samples, "sample")
        if margin is not None:
            share = statistics.mean_pass_probability(self.differences, self.lower_bound(alpha), margin)
            return f"on {samples} an equally good model passes a comparison in {share:.0%} of cases"
        found = statistics.detectable_mean(self.differences, lower_bound_by_sign_flips(self.differences, alpha))
        difference = f"a difference of {self.format_difference(found)[1:]}" if math.isfinite(found) else "no difference"
        return f"on {samples} {difference} is found in {statistics.POWER:.0%} of cases"


Pair = PairedCounts | PairedScores


def compare_scores(mine: Floats, theirs: Floats, measure: str, *, is_loss: bool = False) -> Pair:
    """Return the comparison of two models' scores [N] of the same samples: of counts if all scores are 0 or 1.

    With ``is_loss`` scores are losses times -1, and differences are shares of the mean of ``theirs``, unless that is 0.
    """
    if not is_loss and all(np.isin(scores, (0, 1)).all() for scores in (mine, theirs)):
        return PairedCounts.count(mine == 1, theirs == 1)
    unit = abs(float(theirs.mean())) if is_loss else 0.0
    return PairedScores((mine - theirs) / (unit or 1.0), measure, is_share=unit > 0)
