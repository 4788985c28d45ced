"""Exact evaluation on all ranks, and what it decides: which weights are kept, and when training stops early."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flyte_ddp.errors import UserError
from flyte_ddp.loading.split import Split
from flyte_ddp.objectives.objective import Objective, convert_outputs, loss_columns
from flyte_ddp.objectives.threshold import decide
from flyte_ddp.parallel.distributed import broadcast_object, gather_objects, hide_process_group, rank, world_size
from flyte_ddp.samples.leaves import Leaves

SAVED = ("best", "evaluations_since_best", "stopped", "epoch")  # of a Selection, in checkpoints


@dataclass(frozen=True)
class Evaluation:
    """Measures of one split, and the columns that they come from."""

    measures: dict[str, float]  # "loss" and the objective's, by name; rank 0's on all ranks
    # By name [N] or [N, k], one row for each sample in the split's order: fp64 on the CPU. "loss" and the objective's;
    # "weight" if the objective has weights, and then "loss" is the weighted sum.
    columns: dict[str, Tensor]
    threshold: float | None = None  # by which classes were predicted


def gather_columns(
    predict: Callable[[Leaves, Leaves, int], Any], split: Split, batch_size: int, objective: Objective
) -> dict[str, Tensor]:
    """Return a split's columns, equal on all ranks and for any number of ranks. All ranks must call it.

    ``predict`` maps a batch's inputs, targets and number of samples to outputs. A damaged image counts as the sample
    that replaces it.
    """
    own = []  # of this rank's batches, which are whole: the place of the first sample, and the columns
    with torch.no_grad():  # not inference_mode: training could not use a tensor that a model keeps from an evaluation
        for place, (inputs, targets, _) in split.load_evaluation_batches(batch_size, rank(), world_size()):
            samples = place.stop - place.start
            found = compute_columns(objective, predict(inputs, targets, samples), targets, samples)
            # Copies, because a model may write its next outputs into the same memory.
            copies = {name: each.double().clone(memory_format=torch.contiguous_format) for name, each in found.items()}
            own.append((place.start, copies))
    on_host = [(start, {name: column.cpu().numpy() for name, column in found.items()}) for start, found in own]
    parts = sorted(chain.from_iterable(gather_objects(on_host)), key=itemgetter(0))
    starts = accumulate((len(columns["loss"]) for _, columns in parts), initial=0)
    if [*starts] != [*(start for start, _ in parts), len(split)]:
        raise RuntimeError(f"evaluation did not count each of {len(split)} samples exactly once")
    layouts = [{name: tuple(column.shape[1:]) for name, column in found.items()} for _, found in parts]
    for layout in layouts:
        if layout != layouts[0]:
            raise UserError(
                f"the objective's columns are {layouts[0]} in one batch and {layout} in another: must have one shape a "
                "sample; fill up shorter ones"
            )
    names = parts[0][1] if parts else ()
    return {name: torch.from_numpy(np.concatenate([found[name] for _, found in parts])) for name in names}


def measure_split(objective: Objective, columns: dict[str, Tensor]) -> Evaluation:
    """Return the evaluation of a split from its columns, as the objective's threshold decides. Collective."""
    threshold = objective.facts.threshold
    if threshold is not None and columns:
        columns = {**columns, "prediction": decide(columns["probability"], threshold).double()}
    # All ranks use rank 0's measures. Processors of different kinds may add up in different orders, and because of one
    # last bit a rank could stop training while the others continue and wait for it.
    measures: dict[str, float] = {}
    if rank() == 0 and columns:
        loss = mean_loss(columns)
        if math.isfinite(loss):
            with hide_process_group():
                measures = measure_columns(objective, columns)
        else:  # outputs that are not finite are refused by scikit-learn, whose error would hide the cause
            measures = {**dict.fromkeys(objective.order_measures(), math.nan), "loss": loss}
    return Evaluation(broadcast_object(measures), columns, threshold)


def compute_columns(objective: Objective, outputs: Any, targets: Leaves, samples: int) -> dict[str, Tensor]:
    """Return the objective's columns of a batch, computed in fp64, with those of :func:`loss_columns`."""
    outputs, compared = (convert_outputs(values, torch.float64) for values in (outputs, targets))
    columns = loss_columns(objective.losses(outputs, compared), objective.weights(targets), samples)
    for name, column in objective.columns(outputs, compared).items():
        if column.shape[:1] != (samples,):
            raise UserError(
                f"column {name!r} of the objective has shape {list(column.shape)}: must have a row for each of the "
                f"{samples} samples; do not reduce it"
            )
        columns[name] = column
    return columns


def measure_columns(objective: Objective, columns: dict[str, Tensor]) -> dict[str, float]:
    """Return the objective's measures of one or more samples, the main one first, and the loss as the last."""
    found = objective.measure(columns)
    if found.keys() != objective.measures.keys():
        raise UserError(
            f"{type(objective).__name__}.measure returned {', '.join(found) or 'nothing'}: must be what its measures "
            f"names: {', '.join(objective.measures) or 'nothing'}"
        )
    return {**{name: float(found[name]) for name in objective.order_measures()}, "loss": mean_loss(columns)}


def mean_loss(columns: dict[str, Tensor]) -> float:
    """Return the weighted mean of the losses of one or more samples; 0 without any weight."""
    weight = columns["weight"].sum().item() if "weight" in columns else len(columns["loss"])
    return columns["loss"].sum().item() / (weight or 1)


class Selection:
    """The weights to keep and their evaluation, chosen by the validation split alone. Equal on all ranks."""

    def __init__(self, keep: str, patience: int, measure: str = "loss", *, higher_is_better: bool = False) -> None:
        self.keep, self.patience, self.measure = keep, patience, measure
        self.sign = -1.0 if higher_is_better else 1.0
        self.best = math.inf  # the measure of the best evaluation, times the sign
        self.evaluations_since_best = 0
        self.stopped = ""  # why training stops early; empty: it does not
        self.epoch = 0  # epochs that were done when the weights were kept; 0: none are kept yet
        self.test: Evaluation
        self.weights: dict[str, Tensor]

    def select_weights(self, epoch: int, validation: Evaluation, test: Evaluation, weights: dict[str, Tensor]) -> None:
        """Keep ``weights`` and ``test``; with ``keep`` "best" a copy of ``validation``'s best. May set ``stopped``."""
        self.evaluations_since_best += 1
        found = self.sign * validation.measures.get(self.measure, math.inf)
        if better := found < self.best:
            self.best, self.evaluations_since_best = found, 0
        better = better or not self.epoch
        if better or self.keep != "best":
            self.weights = copy.deepcopy(weights) if self.keep == "best" else weights
            self.epoch, self.test = epoch, test
        if 0 < self.patience <= self.evaluations_since_best:
            evaluations = f"{self.evaluations_since_best} evaluation(s)"
            self.stopped = f"after epoch {epoch}: no better validation {self.measure} in {evaluations}"

    def kept_measure(self, validation: Evaluation) -> float:
        """Return the measure, on the validation split, of the weights that would be kept after this evaluation."""
        found = validation.measures.get(self.measure, math.nan)
        return found if self.keep != "best" or self.sign * found < self.best else self.sign * self.best

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SAVED} | {"test": vars(self.test) if self.epoch else None}

    def load_state_dict(self, saved: dict[str, Any], weights: dict[str, Tensor]) -> None:
        for name in SAVED:
            setattr(self, name, saved[name])
        if self.epoch:
            self.test, self.weights = Evaluation(**saved["test"]), weights
