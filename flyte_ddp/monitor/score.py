"""Measures a window's samples with a truth, and tests whether the main measure is worse than on held-out samples."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binomtest, fisher_exact, norm
from torch import Tensor

from flyte_ddp.core.objectives.objective import Columns
from flyte_ddp.core.training.evaluate import compute_measures
from flyte_ddp.monitor.window import FEWEST, Score
from flyte_ddp.objectives import Classification, Objective, Regression
from flyte_ddp.predict.sample_columns import draw_objective_columns
from flyte_ddp.release.scores import FORMULAS, is_higher_better, name_scores, needs_call_per_sample, score_samples

ALPHA = 0.01  # of a window, one-sided
DRAWS = 299  # permutations; at ALPHA up to two may be as bad as the window
# Conversions from the mean of scores, here losses, to the measure, and back.
MEASURE_OF_SCORE = {"squared error": lambda mean: math.sqrt(max(0.0, mean)), "loss of a token": math.exp}
SCORE_OF_MEASURE = {"squared error": lambda value: value**2, "loss of a token": math.log}


@dataclass(frozen=True)
class HeldOut:
    """The champion's results on the held-out samples of its release."""

    score: float  # the main measure of all held-out samples
    samples: int
    columns: Columns  # the objective's, of some samples; empty: an older release judged the version


def score_window(objective: Objective, parts: Sequence[Mapping[str, Tensor]], held_out: HeldOut, seed: int) -> Score:
    """Return the main measure of a window's samples with a truth, and whether the measure is worse than held out.

    Args:
        objective: The champion's objective.
        parts: The objective's columns of the samples with a truth, by batch. May be empty.
        held_out: The champion's results at its release.
        seed: The seed of the drawn samples and permutations.
    """
    columns = {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}
    found = measure_samples_with_truth(objective, columns)
    if found.score is None:
        return found
    drawn = {name: torch.from_numpy(values) for name, values in draw_objective_columns(columns, seed).items()}
    p = find_p_value_of_worse(objective, drawn, found.score, held_out, seed)
    return found if p is None else replace(found, worse_p=p, worse=p <= ALPHA)


def measure_samples_with_truth(objective: Objective, columns: Columns) -> Score:
    """Return the number of samples with a truth, the main measure, and the measure's 95 % interval.

    The interval of an accuracy is Wilson's. The interval of a mean of the samples' scores assumes that the mean is
    normally distributed. Other measures have no interval. With fewer than 50 samples, measure and interval are None.
    """
    samples = len(columns["loss"]) if columns else 0
    found = Score(truths=samples)
    if samples < FEWEST or columns.get("prediction", columns["loss"]).isinf().any():
        return found
    score = compute_measures(objective, dict(columns))[objective.main_measure]
    if not math.isfinite(score):
        return found
    found = replace(found, score=score)
    if is_accuracy(objective):
        low, high = binomtest(round(score * samples), samples).proportion_ci(method="wilson")
        return replace(found, low=low, high=high)
    scores = score_samples_if_mean(objective, columns)
    if scores is None or not scores.std():  # equal scores have no normal distribution
        return found
    higher = is_higher_better(objective)
    scores, in_units = scores * (1 if higher else -1), MEASURE_OF_SCORE.get(name_scores(objective), float)
    low, high = map(in_units, norm.interval(0.95, scores.mean(), scores.std(ddof=1) / math.sqrt(samples)))
    # Measures with higher scores for better answers, such as F1, are shares.
    return replace(found, low=max(0.0, low), high=min(1.0, high)) if higher else replace(found, low=low, high=high)


def is_accuracy(objective: Objective) -> bool:
    return type(objective).measure is Classification.measure and objective.main_measure == "accuracy"


def score_samples_if_mean(objective: Objective, columns: Columns) -> NDArray[np.float64] | None:
    """Return each sample's score, or None if the main measure is not a mean of the scores. Higher is better.

    Also returns None for user-defined measures or scores, and for several predicted numbers.
    """
    kind = type(objective)
    several = isinstance(objective, Regression) and columns["prediction"][0].numel() > 1
    own = kind.measure not in FORMULAS or kind.scores not in (Objective.scores, Classification.scores)
    return None if own or several or needs_call_per_sample(objective) else score_samples(objective, columns)


def find_p_value_of_worse(
    objective: Objective, columns: Columns, score: float, held_out: HeldOut, seed: int
) -> float | None:
    """Return the one-sided p-value for a score worse than held out, or None if no test is possible.

    Args:
        objective: The champion's objective.
        columns: The objective's columns of all or some samples with a truth.
        score: The main measure of all samples with a truth.
        held_out: The champion's results at its release.
        seed: The seed of permutations.
    """
    if held_out.columns.keys() >= columns.keys():
        return p_value_by_permutations(objective, columns, held_out.columns, seed)
    return p_value_from_held_out_score(objective, columns, score, held_out)


def p_value_by_permutations(objective: Objective, columns: Columns, held_out: Columns, seed: int) -> float | None:
    """Return the p-value of a permutation test that the main measure is worse than held out.

    Returns None if the measure is undefined. Permutations for which the measure is undefined do not count. Drawing
    stops early when the p-value cannot become as small as ALPHA (Besag and Clifford, Biometrika 78, 1991).
    """
    sign, name = 1 if is_higher_better(objective) else -1, objective.main_measure
    samples, random = len(columns["loss"]), np.random.default_rng(seed)
    every = {key: torch.cat((column, held_out[key])) for key, column in columns.items()}

    def subtract_measures(order: NDArray[np.int64]) -> float:
        sides = ({key: column[part] for key, column in every.items()} for part in np.split(order, [samples]))
        ours, theirs = (compute_measures(objective, side)[name] for side in sides)
        return sign * (ours - theirs)

    total = len(every["loss"])
    observed, draws, as_bad = subtract_measures(np.arange(total)), 0, 0
    if not math.isfinite(observed):
        return None
    for _ in range(10 * DRAWS):
        drawn = subtract_measures(random.permutation(total))
        draws += math.isfinite(drawn)
        as_bad += drawn <= observed + 1e-12 * abs(observed)  # equal measures may differ in the last bit
        if as_bad >= ALPHA * (DRAWS + 1):
            return as_bad / draws
        if draws == DRAWS:
            break
    return (as_bad + 1) / (draws + 1)


def p_value_from_held_out_score(
    objective: Objective, columns: Columns, score: float, held_out: HeldOut
) -> float | None:
    """Return the p-value of a worse main measure, from the held-out score without the held-out samples.

    An accuracy is tested by Fisher's exact test. For RMSE and perplexity, means are assumed to be normally distributed,
    and the held-out scores to vary as much as the window's. Returns None for other measures, or if all scores of the
    window are equal.
    """
    samples = len(columns["loss"])
    if is_accuracy(objective):
        pairs = ((score, samples), (held_out.score, held_out.samples))
        counts = [(right := round(share * number), number - right) for share, number in pairs]
        return float(fisher_exact(counts, alternative="less").pvalue)
    to_score, scores = SCORE_OF_MEASURE.get(name_scores(objective)), score_samples_if_mean(objective, columns)
    if to_score is None or scores is None or not (deviation := scores.std(ddof=1)):
        return None
    error = deviation * math.sqrt(1 / samples + 1 / held_out.samples)
    return float(norm.cdf((scores.mean() + to_score(held_out.score)) / error))  # scores are minus losses
