"""Checks of a challenger and the champion. Each ``check_*`` function returns a Check, which passes or fails."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.text.formatting import format_count, format_measure, format_p_value, join_first, name_measure
from flyte_ddp.export.exporting import Comparison
from flyte_ddp.objectives import Multilabel, Objective, Segmentation
from flyte_ddp.release.evaluation import Evaluation, evaluate_constant
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.samples import Floats, find_changes
from flyte_ddp.release.scores import has_formula, has_pseudo_values, is_higher_better, name_scores, score_parts
from flyte_ddp.release.statistics import (
    NUMBERS,
    POINTS,
    ScoreDifferences,
    compare_scores,
    correct_p_values,
    lower_bound_of_mean,
)
from flyte_ddp.release.task import Task, is_reordered
from flyte_ddp.release.verdict import Check

RANKINGS = ("auroc", "average_precision")  # measures that need scores but no predictions
ABOVE_CONSTANT = "better than the best constant answer"  # name of a Check
DISTINCT = 0.001  # smaller p-values count as a change under every policy
LEAST_SAMPLES = 30  # of a class or slice that is tested: with fewer, 5 points are a single sample
PLURAL = {"class": "classes", "label": "labels", "slice": "slices"}


def compare_evaluations(
    mine: Evaluation, theirs: Evaluation, part: NDArray[np.int64] | slice = slice(None)
) -> ScoreDifferences:
    """Return the comparison of two models' scores on all samples, or on the samples at the positions ``part``."""
    names = name_scores(mine.objective)
    is_loss, counted = not is_higher_better(mine.objective), not has_pseudo_values(mine.objective)
    return compare_scores(mine.scores[part], theirs.scores[part], names, is_loss=is_loss, counted=counted)


def compare_part(mine: Evaluation, theirs: Evaluation, part: NDArray[np.int64]) -> ScoreDifferences:
    """Return the comparison of two models on the samples of a class or a slice.

    ``part`` holds the positions of the samples. Two classifiers that are judged by predictions are compared by correct
    predictions. Scores may be pseudo-values of a measure of the whole split, and do not describe a part. Other models
    are compared by scores.
    """
    if mine.classifies and theirs.classifies and is_decision(mine.objective):
        return compare_scores(mine.correct[part], theirs.correct[part], "accuracy")
    return compare_evaluations(mine, theirs, part)


def is_decision(objective: Objective) -> bool:
    """Return whether the model is judged by its predictions.

    False for AUROC and average precision without a threshold.
    """
    return objective.main_measure not in RANKINGS or objective.facts.threshold is not None


def check_same_task(challenger: Task, champion: Task) -> Check:
    """Return the Check that users of the champion can use the challenger without a change.

    The order of the classes may differ if the objective's outputs can be reordered, and neither task has a positive
    class. The reason names the first fact that changed.
    """
    same = {"classes", "positive class"} if is_reordered(challenger, champion) else {"positive class"}
    changed = next((name for name in challenger.list_changes(champion) if name not in same), "")
    reason = f"the {changed} changed, so users of the model must change, too; promote it by hand" if changed else ""
    if changed == "classes":
        names = (join_first(each.classes) for each in (champion, challenger))
        reason = f"the classes changed from {next(names)} to {next(names)}; restore the names, or promote it by hand"
    shown = f"another {changed}" if changed else "the same"
    return Check("objective, classes and input", not changed, shown=shown, rule="the same", reason=reason)


def check_finite_outputs(challenger: Evaluation) -> Check:
    """Return the Check that no output is NaN or infinite. The reason names the first sample with such an output."""
    bad = np.flatnonzero(~challenger.finite)
    reason = f"sample {challenger.ids[bad[0]] if challenger.ids else bad[0]} gives NaN or infinity" if len(bad) else ""
    shown = f"{format_count(len(bad), 'sample')} with NaN or infinity"
    return Check("finite", not len(bad), len(bad), 0, shown, "none", reason)


def check_score(challenger: Evaluation, policy: Policy) -> Check:
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


def compare_with_constant(found: Evaluation) -> tuple[ScoreDifferences, str, float | None] | None:
    """Compare a model with the best constant answer on the same samples. ``found`` is the model's evaluation.

    Differences are positive if the model is better.

    Returns:
        The comparison, a text with both scores, and the constant answer's main measure. The measure is None if only the
        constant answer's loss is known. Returns None if no constant answer is known.

    Raises:
        UserError: The scores of the samples cannot be computed.
    """
    objective, columns, constant = found.objective, found.columns, evaluate_constant(found)
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


def check_above_constant(challenger: Evaluation, alpha: float) -> Check:
    """Return the Check that the challenger is better than the best constant answer.

    The Check passes if the p-value of the difference is at most ``alpha``, or if no constant answer is known.
    """
    name = ABOVE_CONSTANT
    if (compared := compare_with_constant(challenger)) is None:
        reason = "the best constant answer is unknown, so the model was not compared with a constant answer"
        return Check(name, True, shown="unknown", reason=reason)
    p = compared[0].p_value()
    return check_p_value(name, p, alpha, "" if p <= alpha else compared[1])


def check_champion_above_constant(champion: Evaluation, *, was_above: bool) -> Check | None:
    """Return the Check that the champion is not worse than the best constant answer.

    The Check fails if the p-value for a worse champion is below DISTINCT (0.001), unless ``was_above`` is False: a
    person may have promoted a champion that was no better than the constant. Returns None if no constant is known.

    Args:
        champion: The evaluation of the champion.
        was_above: Whether the champion was better than the constant answer at its release.
    """
    if (compared := compare_with_constant(champion)) is None:
        return None
    differences, text, _ = compared
    p = differences.p_value_of_loss()
    worse = p < DISTINCT
    reason = f"the champion is below a constant answer: {text.replace('the model', 'the champion')}" if worse else ""
    name, shown, rule = "champion not below a constant answer", f"p = {p:.3g} for a worse one", f"at least {DISTINCT:g}"
    return Check(name, not (worse and was_above), p, DISTINCT, shown, rule, reason)


def check_repeated_answers(then: Floats, now: Floats, *, classifies: bool) -> Check:
    """Return the Check that the champion's answers on samples of its release have not changed beyond chance.

    The Check fails if a two-sided p-value is below DISTINCT (0.001). The Check passes without samples.

    Args:
        then: The quality of the champion's answers at the release [n], a result of ``answer_qualities``.
        now: The quality of the champion's answers today, for the same samples.
        classifies: Whether the qualities are 1 for a right and 0 for a wrong class. Otherwise, minus the loss.
    """
    name, rule = "champion's answers on samples of its release", f"no change with p below {DISTINCT:g}"
    if not len(then):
        return Check(name, True, shown="no sample in common")
    changes = find_changes(then, now)
    differences = ScoreDifferences(changes, "", POINTS if classifies else NUMBERS)
    p = min(1.0, 2 * min(differences.p_value(), differences.p_value_of_loss()))
    both = now.mean(), then.mean()
    means = [
        f"accuracy {format_measure('accuracy', mean)}" if classifies else f"a loss of {-mean:.4g}" for mean in both
    ]
    shown = f"{means[0]} on {format_count(len(then), 'sample')}, compared with {means[1]} at its release"
    passed = p >= DISTINCT
    reason = f"the champion has {shown} (p = {p:.3g}), so inputs or labels of the same samples have changed"
    return Check(name, passed, p, DISTINCT, shown, rule, "" if passed else reason)


def check_superior(differences: ScoreDifferences, alpha: float) -> Check:
    """Return the Check that the challenger beats the champion with a p-value of at most ``alpha``.

    The test is McNemar's exact test for scores of 0 and 1, and otherwise a sign-flip test.
    """
    p = differences.p_value()
    reason = f"{differences.describe()} (p {format_p_value(p)}, must be at most {alpha:.3g})"
    return check_p_value("superior", p, alpha, reason)


def check_p_value(name: str, p: float, alpha: float, reason: str) -> Check:
    return Check(name, p <= alpha, p, alpha, f"p {format_p_value(p)}", f"p at most {alpha:.3g}", reason)


def check_not_worse(name: str, differences: ScoreDifferences, margin: float, alpha: float) -> Check:
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


def compare_labels(classes: Sequence[str], challenger: Evaluation, champion: Evaluation) -> dict[str, ScoreDifferences]:
    """Return the comparison of each label's scores, by the label's name. Labels of a segmentation are its classes.

    ``classes`` are the names of the labels. Skips labels whose measure is undefined for either model. Returns {} unless
    the objective is multilabel or segmentation, with a main measure that has scores for each label.
    """
    objective = challenger.objective
    if not isinstance(objective, (Multilabel, Segmentation)) or not has_formula(objective):
        return {}
    ours, theirs = (score_parts(objective, model.columns) for model in (challenger, champion))
    named, measure = dict(enumerate(classes)), name_scores(objective)
    return {
        named.get(place, str(place)): compare_scores(ours[:, place], theirs[:, place], measure)
        for place in range(ours.shape[1])
        if np.isfinite(ours[0, place]) and np.isfinite(theirs[0, place])
    }


def check_parts_not_worse(
    kind: str, comparisons: Mapping[str, ScoreDifferences], policy: Policy
) -> tuple[Check, list[Check]]:
    """Return the Check that the challenger is not clearly worse on any part of the samples, and each part's Check.

    A part is a class, a label or a slice. A part fails if the challenger is worse by more than the policy's
    ``class_loss``, and the p-value after Holm's correction is at most ``alpha``. Parts of fewer than LEAST_SAMPLES (30)
    samples pass. The first Check passes if all parts pass, and shows the worst part of at least 30 samples. Its reason
    has the reasons of up to 3 failed parts.

    Args:
        kind: "class", "label" or "slice".
        comparisons: The comparison with the champion on each part, by the part's name.
        policy: The policy.
    """
    tested = {name: each for name, each in comparisons.items() if each.samples >= LEAST_SAMPLES}
    corrected = correct_p_values([each.p_value_of_loss() for each in tested.values()])
    p_values = dict(zip(tested, corrected, strict=True))
    rows = []
    for name, differences in comparisons.items():
        p, passed, reason = p_values.get(name), True, f"only {differences.samples} samples"
        if p is not None:
            passed = p > policy.alpha or -differences.difference <= policy.class_loss
            reason = "" if passed else f"{kind} {name!r} loses: {differences.describe()}"
        p_text = "not tested" if p is None else f"p {format_p_value(p)}"
        shown = f"{differences.format_difference(differences.difference)}, {p_text}"
        rule = f"above {differences.format_difference(-policy.class_loss)}, or p above {policy.alpha:g}"
        rows.append(Check(name, passed, differences.difference, -policy.class_loss, shown, rule, reason))
    name = f"no {PLURAL[kind]} lost"
    if not tested:
        return Check(name, True, shown=f"no {kind} has at least {LEAST_SAMPLES} samples"), rows
    vetoes = [row.reason for row in rows if not row.passed]
    worst = min((row for row in rows if row.name in tested), key=lambda row: row.value or 0.0)
    summary = replace(worst, name=name, shown=f"worst: {worst.name}, {worst.shown}", reason="; ".join(vetoes[:3]))
    return replace(summary, passed=not vetoes), rows


def check_likelihood(challenger: Evaluation, champion: Evaluation, policy: Policy) -> Check:
    """Return the Check that the mean negative log-likelihood does not rise too much. Both models must be classifiers.

    The Check passes if the rise is at most the policy's ``nll_rise``. The Check also passes if the lower 1 - ``alpha``
    confidence bound of the rise is not above 0.
    """
    ours, theirs = (model.columns["nll"].numpy() for model in (challenger, champion))
    rise, bound = float((ours - theirs).mean()), lower_bound_of_mean(ours - theirs, policy.alpha)
    passed, name = bound <= 0 or rise <= policy.nll_rise, "negative log-likelihood"
    shown = f"{theirs.mean():.4f} to {ours.mean():.4f}, a rise of at least {bound:+.4f}"
    reason = "" if passed else f"the {name} rises by {rise:.4f}, more than nll_rise={policy.nll_rise:g}"
    return Check(name, passed, rise, policy.nll_rise, shown, f"a rise of {policy.nll_rise:g}, or by chance", reason)


def check_export(found: Comparison | str, *, required: bool) -> Check:
    """Return the Check that the ONNX gives torch's outputs. Unless an ONNX is ``required``, the Check always passes.

    ``found`` is the comparison with torch, or a text why there is no ONNX.
    """
    rule = "as torch" if required else ""
    if isinstance(found, str):
        return Check("export", not required, shown="none", rule=rule, reason=f"not exported: {found}")
    said = f"outputs of the ONNX model differ from torch's by up to {found.worst:.2g} (limit {found.tolerance:.2g})"
    passed, left_out = found.passed or not required, "" if found.passed else "; the version gets no ONNX file"
    value = found.worst if math.isfinite(found.worst) else None
    return Check("export", passed, value, found.tolerance, f"{found.worst:.2g}", rule, f"{said}{left_out}")
