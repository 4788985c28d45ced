"""The checks of a judgement: each function returns a Check, which holds value, limit and reason as text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.errors import UserError
from flyte_ddp.export.exporting import Comparison
from flyte_ddp.formatting import format_count, format_percent
from flyte_ddp.release import statistics
from flyte_ddp.release.evaluation import Evaluation
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.verdict import Check

LEAST_SAMPLES = 30  # that a class or a slice must have to be tested: with fewer, 5 points are one sample


@dataclass(frozen=True)
class PairedCounts:
    """Numbers of samples that only one of two models gets right: gained by the challenger, or lost by it."""

    gained: int
    lost: int
    samples: int  # all of them

    @classmethod
    def count(cls, mine: NDArray[np.bool_], theirs: NDArray[np.bool_]) -> Self:
        """Return the counts for two models; ``mine`` and ``theirs`` [N] say which samples each gets right."""
        return cls(int((mine & ~theirs).sum()), int((theirs & ~mine).sum()), len(mine))

    @property
    def difference(self) -> float:
        """The challenger's accuracy minus the other's, from -1 to 1."""
        return (self.gained - self.lost) / self.samples

    def describe(self) -> str:
        """Return the difference and its counts as text."""
        counts = f"{self.gained:,} samples gained and {self.lost:,} lost of {self.samples:,}"
        return f"{format_points(self.difference)}: {counts}"


def format_points(share: float) -> str:
    """Return a difference in accuracy as text: 0.0125 as +1.25 points."""
    return f"{100 * share:+.2f} points"


def check_same_task(challenger: Sequence[str], champion: Sequence[str], inputs: Sequence[str]) -> Check:
    """Return the Check that both models have the same classes, in the same order, and the same input.

    ``challenger`` and ``champion`` are the models' class names, ``inputs`` the two models' inputs as text.
    """
    changed = "" if inputs[0] == inputs[1] else "input"
    changed = changed if list(challenger) == list(champion) else "classes"
    reason = f"the {changed} changed, so whoever uses it must change too: promote it by hand" if changed else ""
    value, limit = f"{len(challenger)} classes, {inputs[0]}", f"{len(champion)} classes, {inputs[1]}"
    return Check("same classes and input", not changed, value, limit, reason)


def check_finite_logits(challenger: Evaluation) -> Check:
    """Return the Check that no logit is NaN or infinite; its reason names the first sample that has one."""
    bad = np.flatnonzero(~challenger.finite)
    reason = f"sample {challenger.ids[bad[0]] if challenger.ids else bad[0]} gives NaN or infinity" if len(bad) else ""
    return Check("finite", not len(bad), f"{format_count(len(bad), 'sample')} with NaN or infinity", "none", reason)


def check_ratio(name: str, value: float, limit: float) -> Check:
    """Return the Check that the challenger's size or time, as a multiple of the champion's, is at most the limit."""
    passed = value <= limit
    reason = "" if passed else f"its {name} is {value:.2f} of the champion's, and {limit:g} is allowed"
    return Check(name, passed, f"{value:.2f}x", f"at most {limit:g}x", reason)


def check_accuracy(challenger: Evaluation, policy: Policy) -> Check:
    """Return the Check that the accuracy is at least the policy's ``min_accuracy``."""
    passed = challenger.accuracy >= policy.min_accuracy
    value, limit = format_percent(challenger.accuracy), format_percent(policy.min_accuracy)
    reason = "" if passed else f"its accuracy is {value}, and min_accuracy is {limit}"
    return Check("accuracy", passed, value, f"at least {limit}", reason)


def check_above_majority(challenger: Evaluation, alpha: float) -> Check:
    """Return the Check, by a binomial test, that the challenger beats always naming the most frequent class."""
    share = float(np.bincount(challenger.labels).max() / len(challenger.labels))
    p = statistics.binomial_p_value(int(challenger.correct.sum()), len(challenger.labels), share)
    reason = (
        ""
        if p <= alpha
        else f"naming the most frequent class is right in {format_percent(share)}, which it hardly beats"
    )
    return Check("better than the most frequent class", p <= alpha, f"p = {p:.3g}", f"p at most {alpha:.3g}", reason)


def check_superior(pair: PairedCounts, alpha: float) -> Check:
    """Return the Check, by McNemar's exact test, that the challenger is better than the champion."""
    p = statistics.mcnemar_p_value(pair.gained, pair.lost)
    reason = f"{pair.describe()} (p = {p:.3g}, {alpha:.3g} is needed)"
    return Check("superior", p <= alpha, f"p = {p:.3g}", f"p at most {alpha:.3g}", reason)


def check_not_worse(name: str, pair: PairedCounts, margin: float, alpha: float) -> Check:
    """Return the Check, by Tango's test, that the challenger loses less than ``margin`` of accuracy to the ``name``."""
    bound = statistics.lower_bound_of_difference(pair.gained, pair.lost, pair.samples, alpha)
    least, needed = format_points(bound), format_points(-margin)
    reason = f"{pair.describe()}; at least {least} against the {name}, and more than {needed} are needed"
    return Check(f"not worse than the {name}", bound > -margin, f"at least {least}", f"above {needed}", reason)


def check_losses_by_part(
    kind: str, members: Mapping[str, NDArray[np.int64]], challenger: Evaluation, champion: Evaluation, policy: Policy
) -> tuple[Check, list[Check]]:
    """Return the Check that the challenger loses no part of the split to the champion, and a Check for each part.

    A part fails if it loses more than the policy's ``class_loss`` and the p-value (McNemar's test, with Holm's
    correction) is at most the policy's ``alpha``; the first Check fails if any part fails. Parts of fewer than
    LEAST_SAMPLES (30) samples pass. ``kind``, class or slice, says what a part is. ``members`` holds the positions of
    each part's samples, one or more, by the part's name.
    """
    pairs = {
        name: PairedCounts.count(challenger.correct[part], champion.correct[part]) for name, part in members.items()
    }
    tested = {name: pair for name, pair in pairs.items() if pair.samples >= LEAST_SAMPLES}
    corrected = statistics.correct_p_values(
        [statistics.mcnemar_p_value(pair.lost, pair.gained) for pair in tested.values()]
    )
    p_values = dict(zip(tested, corrected, strict=True))
    limit = f"above {format_points(-policy.class_loss)}, or p above {policy.alpha:g}"
    rows = []
    for name, pair in pairs.items():
        p, passed, value, reason = p_values.get(name), True, "not tested", f"only {pair.samples} samples"
        if p is not None:
            passed = p > policy.alpha or -pair.difference <= policy.class_loss
            value, reason = f"p = {p:.3g}", "" if passed else f"{kind} {name!r} loses: {pair.describe()}"
        rows.append(Check(name, passed, f"{format_points(pair.difference)}, {value}", limit, reason))
    vetoes = [row.reason for row in rows if not row.passed]
    value = f"no {kind} has {LEAST_SAMPLES} samples"
    if tested:
        worst = min(tested, key=lambda name: tested[name].difference)
        value = f"worst: {worst}, {format_points(tested[worst].difference)}, p = {p_values[worst]:.3g}"
    plural = "classes" if kind == "class" else "slices"
    return Check(f"no {plural} lost", not vetoes, value, limit, "; ".join(vetoes[:3])), rows


def group_by_class(challenger: Evaluation, classes: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    """Return the positions of each class's samples by its name; raise a UserError if a class has no sample."""
    members = {name: np.flatnonzero(challenger.labels == place) for place, name in enumerate(classes)}
    for name, samples in members.items():
        if not len(samples):
            raise UserError(f"class {name!r}: the test split has no sample of it; judge on one that has")
    return members


def check_loss_rise(
    name: str, challenger: NDArray[np.float64], champion: NDArray[np.float64], limit: float, alpha: float
) -> Check:
    """Return the Check that the mean of the loss ``name`` rises by at most ``limit``, or that the rise may be chance.

    A rise may be chance if its lower confidence bound at 1 - ``alpha``, by a bootstrap, is at most 0. ``challenger``
    and ``champion`` [N] hold each sample's loss.
    """
    rise = float((challenger - champion).mean())
    bound = statistics.lower_bound_of_mean(challenger - champion, alpha)
    passed = bound <= 0 or rise <= limit
    value = f"{champion.mean():.4f} to {challenger.mean():.4f}, a rise of at least {bound:+.4f}"
    reason = "" if passed else f"its {name} rises by {rise:.4f}, and {limit:g} is allowed"
    return Check(name, passed, value, f"a rise of {limit:g}, or by chance", reason)


def calibration_check(*models: Evaluation) -> Check:
    """Return a Check that always passes and holds the models' calibration errors, which depend on the bins."""
    errors = [statistics.calibration_error(model.confidence, model.correct) for model in models]
    return Check("calibration error", True, " to ".join(f"{error:.4f}" for error in errors), "", "")


def check_export(found: Comparison | str, *, required: bool) -> Check:
    """Return the Check that there is an ONNX with torch's logits; it always passes unless ``required``.

    ``found`` says how far the ONNX's logits are from torch's, or why there is no ONNX.
    """
    limit = "as torch" if required else ""
    if isinstance(found, str):
        return Check("export", not required, "none", limit, f"not exported: {found}")
    others = f", and {format_count(len(found.others), 'sample')} get another class" if found.others else ""
    said = f"logits of the ONNX differ by {found.worst:.2g} at most, {found.tolerance:.2g} is allowed{others}"
    left_out = "" if found.passed else "; it is left out"
    return Check("export", found.passed or not required, f"{found.worst:.2g}", limit, f"{said}{left_out}")
