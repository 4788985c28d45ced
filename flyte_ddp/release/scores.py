"""Scores of samples and labels, by which two models are compared. A higher score is better.

The mean of the scores is the objective's main measure, or an equivalent: minus the squared error for RMSE. Some
measures, such as AUROC, are not means over samples. The scores are then leave-one-out pseudo-values: N times the
measure minus N - 1 times the measure without the sample. The mean of the pseudo-values is the measure up to order 1 /
N. If a label's measure is undefined without a sample, the sample counts as not changing the measure. Source: Tukey,
"Bias and confidence in not-quite large samples", Annals of Mathematical Statistics 29, 1958.
"""

import warnings
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyte_ddp.catalog import MEASURES
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.objectives.binary_labels import BinaryLabels
from flyte_ddp.core.objectives.objective import Columns
from flyte_ddp.core.text.formatting import name_measure
from flyte_ddp.objectives import HIGHER, Classification, Language, Multilabel, Objective, Regression, Segmentation

MOST_CALLS = 20_000  # most samples of a measure without a formula, which is called once per sample

Floats = NDArray[np.float64]

# The main measures with a formula for pseudo-values, by the method that computes the measure. Others need calls.
FORMULAS: dict[Callable[..., dict[str, float]], tuple[str, ...]] = {
    Classification.measure: MEASURES["multilabel"],
    Multilabel.measure: MEASURES["multilabel"],
    Segmentation.measure: ("miou",),
    Regression.measure: ("rmse",),
    Language.measure: ("perplexity",),
}


def uses_scores_method(objective: Objective) -> bool:
    """Return whether scores come from the objective's method ``scores``, not from pseudo-values.

    True if the method is user-defined, if the main measure is a classification's accuracy, or if the objective has no
    measures but the loss.
    """
    scores, of_accuracy = type(objective).scores, objective.main_measure == "accuracy"
    inherited = scores is Objective.scores or (scores is Classification.scores and not of_accuracy)
    return not inherited or not objective.measures


def has_pseudo_value_formula(objective: Objective) -> bool:
    return objective.main_measure in FORMULAS.get(type(objective).measure, ())


def needs_call_per_sample(objective: Objective) -> bool:
    """Return whether each sample's score needs a call of the objective's measure, which large test splits forbid."""
    return not has_pseudo_value_formula(objective) and not uses_scores_method(objective)


def has_pseudo_values(objective: Objective) -> bool:
    """Return whether scores are pseudo-values of a measure that is not a mean over samples."""
    return not uses_scores_method(objective) and objective.main_measure not in ("rmse", "perplexity")


def name_scores(objective: Objective) -> str:
    """Return the name of the scores: the main measure's name, or "squared error" for RMSE, for example."""
    name = objective.main_measure
    named = {} if uses_scores_method(objective) else {"rmse": "squared error", "perplexity": "loss of a token"}
    return named.get(name if has_pseudo_value_formula(objective) else "", name_measure(name))


def is_higher_better(objective: Objective) -> bool:
    return objective.measures.get(objective.main_measure) == HIGHER


def score_samples(objective: Objective, columns: Columns) -> Floats:
    """Return each sample's score [N], where higher is better. ``columns`` are the objective's columns of N samples.

    The score is the result of the objective's method ``scores`` if the method fits the main measure. Otherwise the
    score is the sample's jackknife pseudo-value of the main measure, times -1 if less is better. For RMSE the
    pseudo-values are of the squared error, and for perplexity of the loss of a token. If the measure is a mean over
    labels or classes, so is the score. A measure without a formula is called N + 1 times.

    Raises:
        UserError: The objective's scores are not a finite number for each sample. A measure without a formula has more
            than MOST_CALLS (20,000) samples.
    """
    if uses_scores_method(objective):
        scores, samples = np.asarray(objective.scores(columns).double().numpy()), len(columns["loss"])
        if scores.shape != (samples,) or not np.isfinite(scores).all():
            raise UserError(
                f"the objective's scores have shape {list(scores.shape)}, and {np.count_nonzero(~np.isfinite(scores))} "
                f"are not finite: must be a finite number for each of the {samples} samples; override the method scores"
            )
        return scores
    if has_pseudo_value_formula(objective):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # for the mean of no values
            return np.asarray(np.nanmean(pseudo_values_by_formula(objective, columns), axis=1))
    name, sign = objective.main_measure, 1 if is_higher_better(objective) else -1
    return sign * pseudo_values_by_calls(lambda rows: objective.measure(rows)[name], columns)


def pseudo_values_by_formula(objective: Objective, columns: Columns) -> Floats:
    """Return the pseudo-values [N, K] of a main measure that has a formula. Higher values are better.

    K is the number of labels, of classes for mIoU, or of predicted numbers for RMSE. Otherwise K is 1. A label whose
    measure is undefined has NaN.
    """
    name, labels = objective.main_measure, objective.binary_labels(columns)
    if name == "rmse":
        errors = (columns["prediction"] - columns["truth"]).square().reshape(len(columns["truth"]), -1).numpy()
        known = ~np.isnan(errors)
        return -pseudo_values_of_ratios(np.where(known, errors, 0.0), known.astype(float))
    if name == "perplexity":
        losses, tokens = (columns[name].double().numpy()[:, np.newaxis] for name in ("loss", "weight"))
        return -pseudo_values_of_ratios(losses, tokens)
    if name == "miou":
        right, predicted, true = (columns[name].double().numpy() for name in ("correct", "predicted", "true"))
        return pseudo_values_of_ratios(right, predicted + true - right)
    return pseudo_values_of_classes(name, columns) if labels is None else pseudo_values_of_labels(name, labels)


def pseudo_values_of_labels(name: str, labels: BinaryLabels) -> Floats:
    """Return the pseudo-values [N, K] of a measure of each of K labels. A label whose measure is undefined has NaN.

    ``name`` is f1, balanced_accuracy, auroc or average_precision. ``labels`` are truths (1, 0, or NaN if unknown),
    scores, and whether the label is predicted, [N, K] each.
    """
    truth, scores, named = labels
    positive, negative = (truth == 1).astype(float), (truth == 0).astype(float)
    if name == "f1":
        hits = 2.0 * (positive * named)
        return pseudo_values_of_ratios(hits, hits + (positive != named) * (positive + negative), positive)
    if name == "balanced_accuracy":
        recall = pseudo_values_of_ratios(positive * named, positive)
        return np.asarray((recall + pseudo_values_of_ratios(negative * ~named, negative)) / 2)
    return (pseudo_values_of_auroc if name == "auroc" else pseudo_values_of_average_precision)(scores, truth)


def pseudo_values_of_classes(measure: str, columns: Columns) -> Floats:
    """Return the pseudo-values [N, 1] of macro F1 or balanced accuracy: means over classes against the rest.

    ``measure`` is "f1" or "balanced_accuracy". ``columns`` have class numbers, as "truth" and "prediction".
    """
    truth, predicted = (columns[name].numpy()[:, np.newaxis] for name in ("truth", "prediction"))
    classes = np.unique(truth if measure == "balanced_accuracy" else (truth, predicted))
    total = np.zeros(truth.shape)
    for each in classes:  # one class at a time, because all classes may not fit into memory
        there, named = (truth == each).astype(float), (predicted == each).astype(float)
        denominators = there if measure == "balanced_accuracy" else (there + named) / 2
        total += pseudo_values_of_ratios(there * named, denominators)
    return total / len(classes)


def jackknife_pseudo_values(measures: Floats, without: Floats) -> Floats:
    """Return the jackknife pseudo-values [N, K] of K measures.

    ``measures`` [K] are of all samples, and ``without`` [N, K] are without each sample. NaN in ``without`` means that
    the measure is undefined, and counts as an unchanged measure.
    """
    samples = len(without)
    return np.asarray(samples * measures - (samples - 1) * np.where(np.isnan(without), measures, without))


def pseudo_values_of_ratios(numerators: Floats, denominators: Floats, members: Floats | None = None) -> Floats:
    """Return the jackknife pseudo-values [N, K] of K ratios of sums, such as F1 or IoU.

    A ratio is the sum of ``numerators`` [N, K] over the sum of ``denominators`` [N, K]. If the sum of ``members`` [N,
    K] (default: the denominators) is 0, the ratio is undefined, and the pseudo-values are NaN.
    """
    above, below = numerators.sum(axis=0), denominators.sum(axis=0)
    members = denominators if members is None else members
    left = members.sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        measures = np.where(left > 0, above / below, np.nan)
        without = np.where(left - members > 0, (above - numerators) / (below - denominators), np.nan)
    return jackknife_pseudo_values(measures, without)


def pseudo_values_of_auroc(scores: Floats, targets: Floats) -> Floats:
    """Return the pseudo-values [N, K] of each label's area under the ROC curve.

    ``scores`` [N, K] are higher for likelier labels. ``targets`` [N, K] are 1 or 0, or NaN if unknown. Unknown targets
    have no influence. A label without samples of both kinds gives NaN.
    """
    areas, without = np.full(scores.shape[1], np.nan), np.full(scores.shape, np.nan)
    for label in range(scores.shape[1]):
        positive, negative = targets[:, label] == 1, targets[:, label] == 0
        ours, theirs = scores[positive, label], scores[negative, label]
        if not len(ours) or not len(theirs):
            continue
        above, below = share_below(ours, theirs), 1 - share_below(theirs, ours)
        areas[label] = above.mean()
        without[:, label] = areas[label]
        for members, shares in ((positive, above), (negative, below)):
            if len(shares) > 1:
                without[members, label] = (shares.sum() - shares) / (len(shares) - 1)
    return jackknife_pseudo_values(areas, without)


def pseudo_values_of_average_precision(scores: Floats, targets: Floats) -> Floats:
    """Return the pseudo-values [N, K] of each label's average precision.

    ``scores`` [N, K] are higher for likelier labels. ``targets`` [N, K] are 1 or 0, or NaN if unknown. Unknown targets
    have no influence. A label without positive samples gives NaN.
    """
    areas, without = np.full(scores.shape[1], np.nan), np.full(scores.shape, np.nan)
    for label in range(scores.shape[1]):
        positive, known = targets[:, label] == 1, ~np.isnan(targets[:, label])
        every, ours = np.sort(scores[known, label]), np.sort(scores[positive, label])
        if not len(ours):
            continue
        # For each positive sample, the numbers of positive and of known samples with at least the same score.
        right, above = (len(each) - np.searchsorted(each, ours, "left") for each in (ours, every))
        fewer = np.maximum(above - 1, 1)
        areas[label] = (right / above).mean()
        without[:, label] = areas[label]
        # Without a sample, the precisions at its score and below change. They are first in the order.
        sums = [np.append(0.0, np.cumsum(each)) for each in (right / above, (right - 1) / fewer, right / fewer)]
        for members, changed, left in ((positive, sums[1], len(ours) - 1), (known & ~positive, sums[2], len(ours))):
            places = np.searchsorted(ours, scores[members, label], "right")
            total = sums[0][-1] - sums[0][places] + changed[places]
            if left < len(ours):
                total = total - np.diff(sums[1])[places - 1]  # the precision of the sample itself
            without[members, label] = total / left if left else np.nan
    return jackknife_pseudo_values(areas, without)


def share_below(values: Floats, others: Floats) -> Floats:
    """Return the share of ``others`` [m] below each of ``values`` [n]. Equal numbers count half."""
    others = np.sort(others)
    places = np.searchsorted(others, values, "left") + np.searchsorted(others, values, "right")
    return np.asarray(places / (2 * len(others)))


def pseudo_values_by_calls(measure: Callable[[Mapping[str, Tensor]], float], columns: Mapping[str, Tensor]) -> Floats:
    """Return the pseudo-values [N] of any measure of columns [N, ...], by N + 1 calls of ``measure``.

    ``measure`` maps columns to a number. Each call gets copies of N - 1 rows, and one call gets all rows. Raises
    UserError for more than MOST_CALLS (20,000) samples.
    """
    samples = len(next(iter(columns.values())))
    check_number_of_calls(samples)
    without = [
        measure({name: torch.cat((column[:sample], column[sample + 1 :])) for name, column in columns.items()})
        for sample in range(samples)
    ]
    return jackknife_pseudo_values(np.array([measure(columns)]), np.array(without)[:, None])[:, 0]


def check_number_of_calls(samples: int) -> None:
    """Raise UserError for more than MOST_CALLS (20,000) samples."""
    if samples > MOST_CALLS:
        raise UserError(
            f"the objective's main measure is not a mean of scores, and {samples:,} samples are more than "
            f"{MOST_CALLS:,} to leave out one at a time; add a method scores(columns) that returns a number for each "
            "sample"
        )
