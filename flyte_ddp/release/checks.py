"""Checks of whole models. Each ``judge_*`` function returns a Check, which passes or fails."""

import math

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.text.formatting import format_count, format_measure, format_p_value, join_first, name_measure
from flyte_ddp.export.exporting import Comparison
from flyte_ddp.release.evaluation import Evaluation, evaluate_best_constant
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.samples import Floats, subtract_without_noise
from flyte_ddp.release.scores import has_pseudo_values, is_higher_better, name_scores
from flyte_ddp.release.statistics import NUMBERS, POINTS, ScoreDifferences, compare_scores
from flyte_ddp.release.task import Task, can_be_reordered
from flyte_ddp.release.verdict import Check

ABOVE_CONSTANT = "better than the best constant answer"  # name of a Check
DISTINCT = 0.001  # smaller p-values count as a change under every policy


def compare_evaluations(
    mine: Evaluation, theirs: Evaluation, part: NDArray[np.int64] | slice = slice(None)
) -> ScoreDifferences:
    """Return the comparison of two models' scores on all samples, or on the samples at the positions ``part``."""
    names = name_scores(mine.objective)
    is_loss, countable = not is_higher_better(mine.objective), not has_pseudo_values(mine.objective)
    return compare_scores(mine.scores[part], theirs.scores[part], names, is_loss=is_loss, countable=countable)


def judge_same_task(challenger: Task, champion: Task) -> Check:
    """Return the Check that users of the champion can use the challenger without a change.

    Objective, classes and input must be the same. The order of the classes may differ if the outputs can be reordered.
    The reason of a failed Check names the first fact that changed.
    """
    same = {"classes", "positive class"} if can_be_reordered(challenger, champion) else {"positive class"}
    changed = next((name for name in challenger.list_changes(champion) if name not in same), "")
    reason = f"the {changed} changed, so users of the model must change, too; promote it by hand" if changed else ""
    if changed == "classes":
        names = (join_first(each.classes) for each in (champion, challenger))
        reason = f"the classes changed from {next(names)} to {next(names)}; restore the names, or promote it by hand"
    shown = f"another {changed}" if changed else "the same"
    return Check("objective, classes and input", not changed, shown=shown, rule="the same", reason=reason)


def judge_finite_outputs(challenger: Evaluation) -> Check:
    """Return the Check that no output is NaN or infinite. The reason names the first sample that fails."""
    bad = np.flatnonzero(~challenger.finite)
    reason = f"sample {challenger.ids[bad[0]] if challenger.ids else bad[0]} gives NaN or infinity" if len(bad) else ""
    shown = f"{format_count(len(bad), 'sample')} with NaN or infinity"
    return Check("finite", not len(bad), len(bad), 0, shown, "none", reason)


def judge_min_score(challenger: Evaluation, policy: Policy) -> Check:
    """Return the Check that the main measure is at least the policy's ``min_score``, or at most if less is better.

    The Check always passes if ``min_score`` is 0.
    """
    name, score, limit = challenger.objective.main_measure, challenger.score, policy.min_score
    higher = is_higher_better(challenger.objective)
    shown, needed = (format_measure(name, value) for value in (score, limit))
    passed = not limit or (score >= limit if higher else score <= limit)
    reason = "" if passed else f"its {name_measure(name)} is {shown}, and min_score is {needed}"
    rule = f"at {'least' if higher else 'most'} {needed}" if limit else ""
    return Check(name_measure(name), passed, score, limit or None, shown, rule, reason)


def compare_with_best_constant(found: Evaluation) -> tuple[ScoreDifferences, str, float | None] | None:
    """Compare a model with the best answer that is the same for every sample. ``found`` is the model's evaluation.

    Returns:
        The differences of the scores, which are positive where the model is better. A text with both scores. The
        constant answer's main measure, or None if only the answer's loss is known. Returns None in place of the three
        values if no constant answer is known.

    Raises:
        UserError: The scores of the samples cannot be computed.
    """
    objective, columns, constant = found.objective, found.columns, evaluate_best_constant(found)
    if constant is not None:
        measure = objective.main_measure
        scores = [format_measure(measure, each.score) for each in (constant, found)]
        text = f"the best constant answer has {name_measure(measure)} {scores[0]}, and the model has {scores[1]}"
        return compare_evaluations(found, constant), text, constant.score
    if (best := objective.loss_of_best_constant(columns)) is None:
        return None
    weight = columns.get("weight", columns["loss"].new_ones(found.samples))
    loss = (columns["loss"].sum() / weight.sum()).item()
    values = (best * weight - columns["loss"]).numpy()
    text = f"the best constant answer has a loss of {best:.4g}, and the model has {loss:.4g}"
    return ScoreDifferences(values, "loss", NUMBERS), text, None


def judge_above_constant(challenger: Evaluation, alpha: float) -> Check:
    """Return the Check that the challenger is better than the best constant answer.

    The Check passes if the p-value of the difference is at most ``alpha``, or if no constant answer is known.
    """
    name = ABOVE_CONSTANT
    if (compared := compare_with_best_constant(challenger)) is None:
        reason = "the best constant answer is unknown, so the model was not compared with a constant answer"
        return Check(name, True, shown="unknown", reason=reason)
    p = compared[0].p_value_of_gain()
    return judge_p_value(name, p, alpha, "" if p <= alpha else compared[1])


def judge_champion_above_constant(champion: Evaluation, *, was_above: bool) -> Check | None:
    """Return the Check that the champion is not below the best constant answer.

    Returns None if no constant answer can be compared. The Check fails if the one-sided p-value that the champion is
    worse is below DISTINCT (0.001).

    Args:
        champion: The evaluation of the champion.
        was_above: Whether the champion was better than the constant answer at its release. If False, the Check passes,
            because a person has promoted the champion nevertheless.
    """
    if (compared := compare_with_best_constant(champion)) is None:
        return None
    differences, text, _ = compared
    p = differences.p_value_of_loss()
    worse = p < DISTINCT
    reason = f"the champion is below a constant answer: {text.replace('the model', 'the champion')}" if worse else ""
    name, shown, rule = "champion not below a constant answer", f"p = {p:.3g} for a worse one", f"at least {DISTINCT:g}"
    return Check(name, not (worse and was_above), p, DISTINCT, shown, rule, reason)


def judge_repeated_answers(then: Floats, now: Floats, *, classifies: bool) -> Check:
    """Return the Check that the champion's answers on samples of its release have not changed beyond chance.

    The Check fails if a two-sided p-value is below DISTINCT (0.001). The Check passes without samples.

    Args:
        then: The champion's answers at the release as numbers [n], a result of ``rate_answers``.
        now: The champion's answers today, for the same samples.
        classifies: Whether the numbers are 1 for a right and 0 for a wrong class. Otherwise, minus the loss.
    """
    name, rule = "champion's answers on samples of its release", f"no change with p below {DISTINCT:g}"
    if not len(then):
        return Check(name, True, shown="no sample in common")
    changes = subtract_without_noise(now, then)
    differences = ScoreDifferences(changes, "", POINTS if classifies else NUMBERS)
    p = min(1.0, 2 * min(differences.p_value_of_gain(), differences.p_value_of_loss()))
    both = now.mean(), then.mean()
    means = [
        f"accuracy {format_measure('accuracy', mean)}" if classifies else f"a loss of {-mean:.4g}" for mean in both
    ]
    shown = f"{means[0]} on {format_count(len(then), 'sample')}, compared with {means[1]} at its release"
    passed = p >= DISTINCT
    reason = f"the champion has {shown} (p = {p:.3g}), so inputs or labels of the same samples have changed"
    return Check(name, passed, p, DISTINCT, shown, rule, "" if passed else reason)


def judge_superior(differences: ScoreDifferences, alpha: float) -> Check:
    """Return the Check that the challenger beats the champion with a p-value of at most ``alpha``.

    The test is McNemar's exact test for scores of 0 and 1, and otherwise a sign-flip test.
    """
    p = differences.p_value_of_gain()
    reason = f"{differences.describe()} (p {format_p_value(p)}, must be at most {alpha:.3g})"
    return judge_p_value("superior", p, alpha, reason)


def judge_p_value(name: str, p: float, alpha: float, reason: str) -> Check:
    return Check(name, p <= alpha, p, alpha, f"p {format_p_value(p)}", f"p at most {alpha:.3g}", reason)


def judge_not_worse(name: str, differences: ScoreDifferences, margin: float, alpha: float) -> Check:
    """Return the Check that the challenger loses less than ``margin`` to another model.

    The test is a lower confidence bound of the difference, of confidence 1 - ``alpha``.

    Args:
        name: The other model in words, such as "champion".
        differences: The comparison with the other model.
        margin: The largest accepted loss. 0.01 is a point of accuracy, or 1 % where less is better.
    """
    bound = differences.lower_bound(alpha)
    least, needed = differences.format_difference(bound), differences.format_difference(-margin)
    reason = f"{differences.describe()}; the lower bound against the {name} is {least}, and must be above {needed}"
    value, shown, rule = bound if math.isfinite(bound) else None, f"at least {least}", f"above {needed}"
    return Check(f"not worse than the {name}", bound > -margin, value, -margin, shown, rule, reason)


def judge_export(found: Comparison | str, *, required: bool) -> Check:
    """Return the Check that the ONNX gives torch's outputs. Unless an ONNX is ``required``, the Check always passes.

    ``found`` is the comparison with torch, or the reason why the export failed.
    """
    rule = "as torch" if required else ""
    if isinstance(found, str):
        return Check("export", not required, shown="none", rule=rule, reason=f"not exported: {found}")
    said = f"outputs of the ONNX model differ from torch's by up to {found.worst:.2g} (limit {found.tolerance:.2g})"
    passed, left_out = found.passed or not required, "" if found.passed else "; the version gets no ONNX file"
    value = found.worst if math.isfinite(found.worst) else None
    return Check("export", passed, value, found.tolerance, f"{found.worst:.2g}", rule, f"{said}{left_out}")
