"""Exact evaluation on all ranks, and what it decides: which weights are kept, and when training stops early."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flyte_ddp.errors import UserError
from flyte_ddp.loading.split import Split
from flyte_ddp.objectives.objective import Objective, convert_outputs
from flyte_ddp.objectives.terms import add_loss_of_terms, loss_columns
from flyte_ddp.parallel.distributed import (
    broadcast_object,
    gather_objects,
    hide_process_group,
    rank,
    sum_over_ranks,
    world_size,
)
from flyte_ddp.samples.leaves import Leaves

SAVED = ("best", "evaluations_since_best", "stopped", "epoch")  # of a Selection, in checkpoints


@dataclass(frozen=True)
class Evaluation:
    """Measures of one split, and the columns that they come from."""

    measures: dict[str, float]  # "loss" and the objective's, by name; rank 0's on all ranks
    # By name [N] or [N, k], one row for each sample in the split's order: fp64 on the CPU. "loss" and the objective's;
    # "weight" if the objective has weights, and then "loss" is the weighted sum. Of terms see add_loss_of_terms.
    columns: dict[str, Tensor]


def evaluate_split(
    predict: Callable[[Leaves, Leaves, int], Any],
    split: Split,
    batch_size: int,
    device: torch.device,
    objective: Objective,
) -> Evaluation:
    """Return the evaluation of a split, equal on all ranks and for any number of ranks. All ranks must call it.

    ``predict`` maps a batch's inputs, targets and number of samples to the model's outputs, without gradients. A
    damaged image counts as the sample that replaces it.
    """
    # Fixed whole batches are dealt to the ranks. A sample's numbers go to its own place. One rank writes there, so the
    # sum over the ranks is exact.
    layout = dict[str, tuple[int, ...]]()  # of a sample's columns: the shape of each by name
    table = make_table(layout, len(split), device)
    with torch.no_grad():  # not inference_mode: training could not use a tensor that a model keeps from an evaluation
        for place, (inputs, targets, _) in split.load_evaluation_batches(batch_size, rank(), world_size()):
            samples = place.stop - place.start
            found = compute_columns(objective, predict(inputs, targets, samples), targets, samples)
            own = {name: tuple(column.shape[1:]) for name, column in found.items()}
            if not layout:
                layout = own
                table = make_table(layout, len(split), device)
            require_one_layout([layout, own])
            table[:-1, place] = torch.cat([column.double().reshape(samples, -1) for column in found.values()], 1).T
            table[-1, place] += 1  # how often the sample was counted
    if world_size() > 1:
        layouts = [each for each in gather_objects(layout) if each]  # a rank without a batch knows no columns
        require_one_layout(layouts)
        layout = layouts[0] if layouts else {}
        if len(table) == 1:
            table = make_table(layout, len(split), device)
    table = sum_over_ranks(table).cpu()
    counted = table[-1]
    if not bool((counted == 1).all()):
        raise RuntimeError(f"evaluation counted {int((counted != 1).sum())} of {len(split)} samples not exactly once")
    rows = torch.split(table[:-1], [math.prod(shape) for shape in layout.values()])
    columns = {  # row by row in memory, as arrays of users are: a sum along samples has the same last digit then
        name: part.T.contiguous().view(-1, *shape) for (name, shape), part in zip(layout.items(), rows, strict=True)
    }
    columns = add_loss_of_terms(columns)
    # All ranks use rank 0's measures. Processors of different kinds may add up in different orders, and because of one
    # last bit a rank could stop training while the others continue and wait for it.
    measures: dict[str, float] = {}
    if rank() == 0 and len(split):
        loss = mean_loss(columns)
        if math.isfinite(loss):
            with hide_process_group():
                measures = measure_columns(objective, columns)
        else:  # outputs that are not finite are refused by scikit-learn, whose error would hide the cause
            measures = {**dict.fromkeys(objective.order_measures(), math.nan), "loss": loss}
    return Evaluation(broadcast_object(measures), columns)


def compute_columns(objective: Objective, outputs: Any, targets: Leaves, samples: int) -> dict[str, Tensor]:
    """Return the objective's columns of a batch, computed in fp64, with those of :func:`loss_columns`."""
    outputs, compared = (convert_outputs(values, torch.float64) for values in (outputs, targets))
    columns = loss_columns(objective.losses(outputs, compared), objective.weights(targets), samples)
    for name, column in objective.columns(outputs, compared).items():
        if not isinstance(column, Tensor):
            raise UserError(
                f"column {name!r} of the objective is a {type(column).__name__}: must be a tensor with a row for each "
                "sample"
            )
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
    try:
        numbers = {name: float(found[name]) for name in objective.order_measures()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{type(objective).__name__}.measure returned what is no number ({error}): return one for each name"
        ) from None
    return {**numbers, "loss": mean_loss(columns)}


def mean_loss(columns: dict[str, Tensor]) -> float:
    """Return the weighted mean of the losses of one or more samples; 0 without any weight."""
    weight = columns["weight"].sum().item() if "weight" in columns else len(columns["loss"])
    return columns["loss"].sum().item() / (weight or 1)


def require_one_layout(layouts: Sequence[dict[str, tuple[int, ...]]]) -> None:
    for layout in layouts:
        if layout != layouts[0]:
            raise UserError(
                f"the objective's columns are {layouts[0]} in one batch and {layout} in another: must have one shape a "
                "sample; fill up shorter ones"
            )


def make_table(layout: dict[str, tuple[int, ...]], samples: int, device: torch.device) -> Tensor:
    return torch.zeros(sum(map(math.prod, layout.values())) + 1, samples, dtype=torch.float64, device=device)


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
        self.validation: Evaluation
        self.weights: dict[str, Tensor]

    def select_weights(self, epoch: int, validation: Evaluation, test: Evaluation, weights: dict[str, Tensor]) -> None:
        """Keep ``weights`` and both evaluations; with ``keep`` "best" only a copy of the best by ``validation``."""
        self.evaluations_since_best += 1
        found = self.sign * validation.measures.get(self.measure, math.inf)
        if better := found < self.best:
            self.best, self.evaluations_since_best = found, 0
        better = better or not self.epoch
        if better or self.keep != "best":
            self.weights = copy.deepcopy(weights) if self.keep == "best" else weights
            self.epoch, self.validation, self.test = epoch, validation, test
        if 0 < self.patience <= self.evaluations_since_best:
            evaluations = f"{self.evaluations_since_best} evaluation(s)"
            self.stopped = f"after epoch {epoch}: no better validation {self.measure} in {evaluations}"

    def state_dict(self) -> dict[str, Any]:
        kept = {name: vars(getattr(self, name)) if self.epoch else None for name in ("validation", "test")}
        return {name: getattr(self, name) for name in SAVED} | kept

    def load_state_dict(self, saved: dict[str, Any], weights: dict[str, Tensor]) -> None:
        for name in SAVED:
            setattr(self, name, saved[name])
        if self.epoch:
            self.validation, self.test = (Evaluation(**saved[name]) for name in ("validation", "test"))
            self.weights = weights
