"""The truth of a window's samples, from a file of the user or a data set, and the main measure by it."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binomtest, norm
from torch import Tensor

from flyte_ddp.errors import UserError
from flyte_ddp.monitor.window import FEWEST
from flyte_ddp.objectives import Classification, Objective, Regression
from flyte_ddp.predict.prediction_batches import Batch, SavedModel
from flyte_ddp.release.scores import FORMULAS, is_higher_better, name_scores, needs_calls, score_samples
from flyte_ddp.release.slices import read_id_table
from flyte_ddp.training.evaluate import measure_columns

MEASURE_OF_SCORE = {"squared error": lambda mean: math.sqrt(max(0.0, mean)), "loss of a token": math.exp}


def add_truth(model: SavedModel, address: str, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield batches with the classes or numbers of the user's file; UserError for an objective of others."""
    truths = {name: truth for _, name, truth in read_id_table("truth", "truth", address) if truth}
    classifies, numbers = isinstance(model.objective, Classification), dict[str, float]()
    if not classifies:
        if not isinstance(model.objective, Regression) or model.objective.facts.target_shape:
            rule = "must be of a model that predicts classes, or one number for each sample"
            raise UserError(f"truth={address!r}: {rule}; give a dataset, which has its own truth")
        try:
            numbers = {name: float(truth) for name, truth in truths.items()}
        except ValueError as error:
            raise UserError(f"truth={address!r}: {error}; give a number for each id") from None
    for batch in batches:
        if classifies:
            yield batch._replace(truths=[truths.get(name, "") for name in batch.ids])
        else:
            targets = torch.tensor([numbers.get(name, math.nan) for name in batch.ids], device=model.device)
            yield batch._replace(targets=targets)


def find_known_truths(batch: Batch) -> NDArray[np.bool_]:
    """Return for each of a batch's samples whether its truth is known, [n]."""
    targets = batch.targets
    if batch.truths is not None:
        return np.array([truth != "" for truth in batch.truths])
    if isinstance(targets, Tensor) and targets.dim() == 1 and targets.is_floating_point():
        return np.asarray(~targets.isnan().cpu().numpy())
    return np.full(len(batch.ids), targets is not None)


def measure_truth(objective: Objective, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """Return fields of a Window from the objective's columns: samples with a truth, their main measure, its interval.

    The 95 % interval is Wilson's for an accuracy, else by the normal distribution of the mean of the samples' scores,
    where that mean is the measure.
    """
    samples = sum(len(part["loss"]) for part in parts)
    found: dict[str, Any] = {"truths": samples}
    if samples < FEWEST:
        return found
    columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if columns.get("prediction", columns["loss"]).isinf().any():
        return found
    score = measure_columns(objective, columns)[objective.main_measure]
    if not math.isfinite(score):
        return found
    found["score"] = score
    kind, higher = type(objective), is_higher_better(objective)
    if kind.measure is Classification.measure and objective.main_measure == "accuracy":
        found["low"], found["high"] = binomtest(round(score * samples), samples).proportion_ci(method="wilson")
        return found
    several = isinstance(objective, Regression) and columns["prediction"][0].numel() > 1
    own = kind.measure not in FORMULAS or kind.scores not in (Objective.scores, Classification.scores)
    if not (own or several or needs_calls(objective)):
        scores = score_samples(objective, columns) * (1 if higher else -1)
        error, in_units = scores.std(ddof=1) / math.sqrt(samples), MEASURE_OF_SCORE.get(name_scores(objective), float)
        if error:  # of equal scores the normal distribution tells nothing
            low, high = map(in_units, norm.interval(0.95, scores.mean(), error))
            # Measures with scores of which more is better, such as F1, are shares.
            found["low"], found["high"] = (max(0.0, low), min(1.0, high)) if higher else (low, high)
    return found
