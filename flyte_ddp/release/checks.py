"""The checks of a judgement, each with its value, limit and reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.errors import UserError
from flyte_ddp.export.exporting import Comparison
from flyte_ddp.formatting import counted, percent
from flyte_ddp.release import statistics
from flyte_ddp.release.answers import Answers
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.verdict import Check

LEAST_SAMPLES = 30  # of a class or a slice, for a veto


@dataclass(frozen=True)
class Pair:
    """How many samples only the challenger (gained), or only another model (lost), gets right."""

    gained: int
    lost: int
    samples: int

    @classmethod
    def of(cls, mine: NDArray[np.bool_], theirs: NDArray[np.bool_]) -> Pair:
        """Return the pair of two models, from whether each gets each of the N samples right: [N]."""
        return cls(int((mine & ~theirs).sum()), int((theirs & ~mine).sum()), len(mine))

    @property
    def discordant(self) -> int:
        """Number of samples that only one of the two gets right."""
        return self.gained + self.lost

    @property
    def difference(self) -> float:
        """The challenger's accuracy minus the other's."""
        return (self.gained - self.lost) / self.samples

    def describe(self) -> str:
        """Return the difference and its counts as text."""
        return f"{points(self.difference)}: {self.gained:,} samples gained and {self.lost:,} lost of {self.samples:,}"


def points(share: float) -> str:
    """Format a difference in accuracy, such as +1.25 points."""
    return f"{100 * share:+.2f} points"


def same_task(challenger: Sequence[str], champion: Sequence[str], takes: Sequence[str]) -> Check:
    """Check that both models have the same classes, in the same order, and the same input."""
    classes, alike = list(challenger) == list(champion), takes[0] == takes[1]
    changed = "classes" if not classes else "" if alike else "input"
    reason = f"the {changed} changed, so whoever uses it must change too: promote it by hand" if changed else ""
    value, limit = f"{len(challenger)} classes, {takes[0]}", f"{len(champion)} classes, {takes[1]}"
    return Check("same classes and input", not changed, value, limit, reason)


def finite(challenger: Answers) -> Check:
    """Check that no logit is NaN or infinite."""
    bad = np.flatnonzero(~challenger.finite)
    reason = f"sample {challenger.ids[bad[0]] if challenger.ids else bad[0]} gives NaN or infinity" if len(bad) else ""
    return Check("finite", not len(bad), f"{counted(len(bad), 'sample')} with NaN or infinity", "none", reason)


def ratio(name: str, value: float, limit: float) -> Check:
    """Check the challenger's size, or time, as a multiple of the champion's."""
    passed = value <= limit
    reason = "" if passed else f"its {name} is {value:.2f} of the champion's, and {limit:g} is allowed"
    return Check(name, passed, f"{value:.2f}x", f"at most {limit:g}x", reason)


def floor(challenger: Answers, policy: Policy) -> Check:
    """Check the accuracy against the policy's ``min_accuracy``."""
    passed = challenger.accuracy >= policy.min_accuracy
    value, limit = percent(challenger.accuracy), percent(policy.min_accuracy)
    reason = "" if passed else f"its accuracy is {value}, and min_accuracy is {limit}"
    return Check("accuracy", passed, value, f"at least {limit}", reason)


def above_majority(challenger: Answers, alpha: float) -> Check:
    """Check that a first champion is better than naming the most frequent class each time."""
    share = float(np.bincount(challenger.labels).max() / len(challenger.labels))
    p = statistics.above_share(int(challenger.correct.sum()), len(challenger.labels), share)
    reason = "" if p <= alpha else f"naming the most frequent class is right in {percent(share)}, which it hardly beats"
    return Check("better than the most frequent class", p <= alpha, f"p = {p:.3g}", f"p at most {alpha:.3g}", reason)


def superior(pair: Pair, alpha: float) -> Check:
    """Check that the challenger is better than the champion, by McNemar's test."""
    p = statistics.better(pair.gained, pair.lost)
    reason = f"{pair.describe()} (p = {p:.3g}, {alpha:.3g} is needed)"
    return Check("superior", p <= alpha, f"p = {p:.3g}", f"p at most {alpha:.3g}", reason)


def not_worse(name: str, pair: Pair, margin: float, alpha: float) -> Check:
    """Check that the challenger is not worse by a margin than the champion, or than the best version ever."""
    bound = statistics.least_difference(pair.gained, pair.lost, pair.samples, alpha)
    reason = (
        f"{pair.describe()}; at least {points(bound)} against the {name}, and more than {points(-margin)} are needed"
    )
    value, limit = f"at least {points(bound)}", f"above {points(-margin)}"
    return Check(f"not worse than the {name}", bound > -margin, value, limit, reason)


def parts(
    kind: str, members: Mapping[str, NDArray[np.int64]], challenger: Answers, champion: Answers, policy: Policy
) -> tuple[Check, list[Check]]:
    """Check that no class, or no slice, loses; return the check over all of them, and one for each.

    A veto needs a loss above the limit that is significant by McNemar's test with Holm's correction.
    """
    pairs = {name: Pair.of(challenger.correct[part], champion.correct[part]) for name, part in members.items()}
    tested = {name: pair for name, pair in pairs.items() if pair.samples >= LEAST_SAMPLES}
    corrected = statistics.holm([statistics.better(pair.lost, pair.gained) for pair in tested.values()])
    p_values = dict(zip(tested, corrected, strict=True))
    limit = f"above {points(-policy.class_loss)}, or p above {policy.alpha:g}"
    rows = []
    for name, pair in pairs.items():
        p = p_values.get(name)
        passed = p is None or p > policy.alpha or -pair.difference <= policy.class_loss
        value = f"{points(pair.difference)}, " + (f"p = {p:.3g}" if p is not None else "not tested")
        few = f"only {pair.samples} samples" if p is None else ""
        rows.append(Check(name, passed, value, limit, few if passed else f"{kind} {name!r} loses: {pair.describe()}"))
    vetoes = [row for row in rows if not row.passed]
    value = f"no {kind} has {LEAST_SAMPLES} samples"
    if tested:
        worst = min(tested, key=lambda name: tested[name].difference)
        value = f"worst: {worst}, {points(tested[worst].difference)}, p = {p_values[worst]:.3g}"
    reason = "; ".join(row.reason for row in vetoes[:3])
    plural = "classes" if kind == "class" else "slices"
    return Check(f"no {plural} lost", not vetoes, value, limit, reason), rows


def class_members(challenger: Answers, classes: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    """Return the positions of each class's samples; raise a UserError if a class has none."""
    members = {name: np.flatnonzero(challenger.labels == place) for place, name in enumerate(classes)}
    for name, samples in members.items():
        if not len(samples):
            raise UserError(f"class {name!r}: the test split has no sample of it; judge on one that has")
    return members


def not_risen(
    name: str, challenger: NDArray[np.float64], champion: NDArray[np.float64], limit: float, alpha: float
) -> Check:
    """Check that the mean [N] of a loss does not rise above the limit and significantly."""
    rise = float((challenger - champion).mean())
    bound = statistics.least_mean(challenger - champion, alpha)
    passed = bound <= 0 or rise <= limit
    value = f"{champion.mean():.4f} to {challenger.mean():.4f}, a rise of at least {bound:+.4f}"
    reason = "" if passed else f"its {name} rises by {rise:.4f}, and {limit:g} is allowed"
    return Check(name, passed, value, f"a rise of {limit:g}, or by chance", reason)


def calibration(challenger: Answers, champion: Answers | None) -> Check:
    """Return the calibration errors; only shown, as their estimate depends on the bins."""
    errors = [
        statistics.calibration_error(model.scores.confidence, model.correct)
        for model in (champion, challenger)
        if model is not None
    ]
    return Check("calibration error", True, " to ".join(f"{error:.4f}" for error in errors), "", "")


def exported(found: Comparison | str, *, required: bool) -> Check:
    """Check that there is an ONNX with torch's logits; only shown where it is not required.

    Args:
        found: how far its logits are from torch's, or why there is no ONNX.
        required: by the policy.
    """
    limit = "as torch" if required else ""
    if isinstance(found, str):
        return Check("export", not required, "none", limit, f"not exported: {found}")
    others = f", and {counted(len(found.others), 'sample')} get another class" if found.others else ""
    said = f"logits of the ONNX differ by {found.worst:.2g} at most, {found.tolerance:.2g} is allowed{others}"
    left_out = "" if found.passed else "; it is left out"
    return Check("export", found.passed or not required, f"{found.worst:.2g}", limit, f"{said}{left_out}")
