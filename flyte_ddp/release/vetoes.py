"""Vetoes: checks that keep the champion although the challenger is better on the whole test split."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.text.formatting import format_p_value
from flyte_ddp.objectives import Multilabel, Objective, Segmentation
from flyte_ddp.release.checks import compare_evaluations
from flyte_ddp.release.evaluation import Evaluation
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.scores import has_pseudo_value_formula, name_scores, pseudo_values_by_formula
from flyte_ddp.release.statistics import ScoreDifferences, bootstrap_lower_bound, compare_scores, correct_p_values
from flyte_ddp.release.verdict import Check

RANKINGS = ("auroc", "average_precision")  # measures that need scores but no predictions
LEAST_SAMPLES = 30  # of a class or slice that is tested: with fewer, 5 points are a single sample
PLURAL = {"class": "classes", "label": "labels", "slice": "slices"}


def judge_vetoes(
    challenger: Evaluation,
    champion: Evaluation,
    classes: Sequence[str],
    slices: Mapping[str, NDArray[np.int64]],
    policy: Policy,
) -> tuple[list[Check], dict[str, list[Check]]]:
    """Return the Checks of classes, slices, labels and likelihoods.

    Args:
        challenger: The evaluation of the challenger.
        champion: The evaluation of the champion, on the same samples.
        classes: The names of classes or labels.
        slices: The positions of each slice's samples in both evaluations, by name.
        policy: The policy, with the largest accepted losses.

    Returns:
        The Checks that must pass, and a Check for each class, label or slice, by "class", "label" or "slice".
    """
    found, of_parts, kinds = list[Check](), dict[str, list[Check]](), {"slice": slices}
    if challenger.classifies and not is_judged_by_predictions(challenger.objective):
        reason = "the measure is of a ranking, and the model has no threshold"
        found.append(Check("no classes lost", True, shown="not tested", reason=reason))
    elif challenger.classifies:
        truth = challenger.columns["truth"].numpy()
        kinds = {"class": {name: np.flatnonzero(truth == place) for place, name in enumerate(classes)}, **kinds}
    comparisons = {
        kind: {name: compare_part(challenger, champion, part) for name, part in parts.items() if len(part)}
        for kind, parts in kinds.items()
        if parts
    }
    if labels := compare_labels(classes, challenger, champion):
        comparisons["label" if isinstance(challenger.objective, Multilabel) else "class"] = labels
    for kind, of_kind in comparisons.items():
        check, of_parts[kind] = judge_parts_not_worse(kind, of_kind, policy)
        found.append(check)
    if challenger.classifies and champion.classifies:
        found.append(judge_likelihood(challenger, champion, policy))
    return found, of_parts


def is_judged_by_predictions(objective: Objective) -> bool:
    """Return whether a main measure needs predictions. False for AUROC and average precision without a threshold."""
    return objective.main_measure not in RANKINGS or objective.facts.threshold is not None


def compare_part(mine: Evaluation, theirs: Evaluation, part: NDArray[np.int64]) -> ScoreDifferences:
    """Return the comparison of two models on the samples of a class or a slice.

    ``part`` holds the positions of the samples. Two classifiers that are judged by predictions are compared by correct
    predictions. Scores may be pseudo-values of a measure of the whole split, and do not describe a part. Other models
    are compared by scores.
    """
    if mine.classifies and theirs.classifies and is_judged_by_predictions(mine.objective):
        return compare_scores(mine.correct[part], theirs.correct[part], "accuracy")
    return compare_evaluations(mine, theirs, part)


def compare_labels(classes: Sequence[str], challenger: Evaluation, champion: Evaluation) -> dict[str, ScoreDifferences]:
    """Return the comparison of each label's scores, by the label's name. Labels of a segmentation are its classes.

    ``classes`` are the names of the labels. Skips labels whose measure is undefined for either model. Returns {} unless
    the objective is multilabel or segmentation, with a main measure that has scores for each label.
    """
    objective = challenger.objective
    if not isinstance(objective, (Multilabel, Segmentation)) or not has_pseudo_value_formula(objective):
        return {}
    ours, theirs = (pseudo_values_by_formula(objective, model.columns) for model in (challenger, champion))
    named, measure = dict(enumerate(classes)), name_scores(objective)
    return {
        named.get(place, str(place)): compare_scores(ours[:, place], theirs[:, place], measure)
        for place in range(ours.shape[1])
        if np.isfinite(ours[0, place]) and np.isfinite(theirs[0, place])
    }


def judge_parts_not_worse(
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


def judge_likelihood(challenger: Evaluation, champion: Evaluation, policy: Policy) -> Check:
    """Return the Check that the mean negative log-likelihood does not rise too much. Both models must be classifiers.

    The Check passes if the rise is at most the policy's ``nll_rise``. The Check also passes if the lower 1 - ``alpha``
    confidence bound of the rise is not above 0.
    """
    ours, theirs = (model.columns["nll"].numpy() for model in (challenger, champion))
    rise, bound = float((ours - theirs).mean()), bootstrap_lower_bound(ours - theirs, policy.alpha)
    passed, name = bound <= 0 or rise <= policy.nll_rise, "negative log-likelihood"
    shown = f"{theirs.mean():.4f} to {ours.mean():.4f}, a rise of at least {bound:+.4f}"
    reason = "" if passed else f"the {name} rises by {rise:.4f}, more than nll_rise={policy.nll_rise:g}"
    return Check(name, passed, rise, policy.nll_rise, shown, f"a rise of {policy.nll_rise:g}, or by chance", reason)
