"""The main measure on a window's samples with a truth, and whether it is worse than on the held-out samples."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binomtest, fisher_exact, norm
from torch import Tensor

from flyte_ddp.monitor.window import FEWEST
from flyte_ddp.objectives import Classification, Objective, Regression
from flyte_ddp.objectives.objective import Columns
from flyte_ddp.predict.sample_columns import draw_measured
from flyte_ddp.release.scores import FORMULAS, is_higher_better, name_scores, needs_calls, score_samples
from flyte_ddp.training.evaluate import measure_columns

ALPHA = 0.01  # of a window, one-sided
DRAWS = 299  # of which up to two may be as bad as the window at ALPHA
# From the mean of scores, which are losses here, to the measure, and back.
MEASURE_OF_SCORE = {"squared error": lambda mean: math.sqrt(max(0.0, mean)), "loss of a token": math.exp}
SCORE_OF_MEASURE = {"squared error": lambda value: value**2, "loss of a token": math.log}


@dataclass(frozen=True)
class HeldOut:
    """How the champion did on its held-out samples."""

    score: float  # the main measure of all of them
    samples: int
    columns: Columns  # the objective's, of some of them; empty: the version was judged before they were stored


def describe_truth(
    objective: Objective, parts: Sequence[Mapping[str, Tensor]], held_out: HeldOut, seed: int
) -> dict[str, Any]:
    """Return the fields of a Window that the objective's columns of batches with a truth determine."""
    columns = {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}
    found = measure_truth(objective, columns)
    if "score" in found:
        drawn = {name: torch.from_numpy(values) for name, values in draw_measured(columns, seed).items()}
        found |= compare_score(objective, drawn, found["score"], held_out, seed)
    return found


def measure_truth(objective: Objective, columns: Columns) -> dict[str, Any]:
    """Return fields of a Window from the objective's columns: samples with a truth, their main measure, its interval.

    The 95 % interval is Wilson's for an accuracy, else by the normal distribution of the mean of the samples' scores,
    where that mean is the measure.
    """
    samples = len(columns["loss"]) if columns else 0
    found: dict[str, Any] = {"truths": samples}
    if samples < FEWEST or columns.get("prediction", columns["loss"]).isinf().any():
        return found
    score = measure_columns(objective, dict(columns))[objective.main_measure]
    if not math.isfinite(score):
        return found
    found["score"] = score
    if is_accuracy(objective):
        found["low"], found["high"] = binomtest(round(score * samples), samples).proportion_ci(method="wilson")
    elif (scores := score_samples_of_mean(objective, columns)) is not None:
        higher = is_higher_better(objective)
        scores, in_units = scores * (1 if higher else -1), MEASURE_OF_SCORE.get(name_scores(objective), float)
        error = scores.std(ddof=1) / math.sqrt(samples)
        if error:  # of equal scores the normal distribution tells nothing
            low, high = map(in_units, norm.interval(0.95, scores.mean(), error))
            # Measures with scores of which more is better, such as F1, are shares.
            found["low"], found["high"] = (max(0.0, low), min(1.0, high)) if higher else (low, high)
    return found


def is_accuracy(objective: Objective) -> bool:
    return type(objective).measure is Classification.measure and objective.main_measure == "accuracy"


def score_samples_of_mean(objective: Objective, columns: Columns) -> NDArray[np.float64] | None:
    """Return each sample's score, of which more is better, or None if their mean is not the main measure."""
    kind = type(objective)
    several = isinstance(objective, Regression) and columns["prediction"][0].numel() > 1
    own = kind.measure not in FORMULAS or kind.scores not in (Objective.scores, Classification.scores)
    return None if own or several or needs_calls(objective) else score_samples(objective, columns)


def compare_score(objective: Objective, columns: Columns, score: float, held_out: HeldOut, seed: int) -> dict[str, Any]:
    """Return fields of a Window: the p-value of a score worse than the held-out score, and whether p is at most ALPHA.

    ``columns`` are of the window's samples with a truth, or of some of them. Returns {} if no test fits.
    """
    if held_out.columns.keys() >= columns.keys():
        p = p_value_of_draws(objective, columns, held_out.columns, seed)
    else:
        p = p_value_without_columns(objective, columns, score, held_out)
    return {} if p is None else {"worse_p": p, "worse": p <= ALPHA}


def p_value_of_draws(objective: Objective, columns: Columns, held_out: Columns, seed: int) -> float | None:
    """Return the one-sided p-value of the permutation test of the main measure's difference, or None if undefined.

    Draws stop as soon as ALPHA cannot be reached (Besag and Clifford, Biometrika 78, 1991). Draws in which the measure
    is undefined on a side do not count.
    """
    sign, name = 1 if is_higher_better(objective) else -1, objective.main_measure
    samples, random = len(columns["loss"]), np.random.default_rng(seed)
    every = {key: torch.cat((column, held_out[key])) for key, column in columns.items()}

    def subtract_measures(order: NDArray[np.int64]) -> float:
        sides = ({key: column[part] for key, column in every.items()} for part in np.split(order, [samples]))
        ours, theirs = (measure_columns(objective, side)[name] for side in sides)
        return sign * (ours - theirs)

    total = len(every["loss"])
    observed, draws, as_bad = subtract_measures(np.arange(total)), 0, 0
    if not math.isfinite(observed):
        return None
    for _ in range(10 * DRAWS):
        drawn = subtract_measures(random.permutation(total))
        draws += math.isfinite(drawn)
        as_bad += drawn <= observed + 1e-12 * abs(observed)  # equal ones may differ in the last bit
        if as_bad >= ALPHA * (DRAWS + 1):
            return as_bad / draws
        if draws == DRAWS:
            break
    return (as_bad + 1) / (draws + 1)


def p_value_without_columns(objective: Objective, columns: Columns, score: float, held_out: HeldOut) -> float | None:
    """Return a one-sided p-value from the held-out score alone: of an accuracy, RMSE or perplexity, else None.

    The p-value of an accuracy is Fisher's. Others assume normal means, and that held-out scores vary as the window's.
    """
    samples = len(columns["loss"])
    if is_accuracy(objective):
        pairs = ((score, samples), (held_out.score, held_out.samples))
        counts = [(right := round(share * number), number - right) for share, number in pairs]
        return float(fisher_exact(counts, alternative="less").pvalue)
    to_score, scores = SCORE_OF_MEASURE.get(name_scores(objective)), score_samples_of_mean(objective, columns)
    if to_score is None or scores is None or not (deviation := scores.std(ddof=1)):
        return None
    error = deviation * math.sqrt(1 / samples + 1 / held_out.samples)
    return float(norm.cdf((scores.mean() + to_score(held_out.score)) / error))  # scores are minus losses
