"""Evaluate exactly on all ranks, select the weights to keep, and decide on early stopping."""

import copy
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.loading.split import Split
from flyte_ddp.core.objectives.objective import Objective, convert_float_tensors, make_loss_columns
from flyte_ddp.core.parallel.distributed import broadcast_object, gather_objects, hide_process_group, rank, world_size
from flyte_ddp.core.runs.checkpoint import State
from flyte_ddp.core.samples.leaves import Leaves

Key = tuple[int, int, str, tuple[int, ...]]  # of a batch's column: the first sample, samples, name, shape of a row
SAVED = ("best", "evaluations_since_best", "stopped", "epoch")  # of a Selection, in checkpoints


@dataclass(frozen=True)
class Evaluation:
    """Measures of a split, and the columns from which the measures are computed."""

    measures: dict[str, float]  # "loss" and the objective's, by name; rank 0's on all ranks
    # By name [N] or [N, k], one row for each sample in the split's order: fp64 on the CPU. "loss" and the objective's;
    # "weight" if the objective has weights, and then "loss" is the weighted sum.
    columns: dict[str, Tensor]
    threshold: float | None = None  # by which classes were predicted


def compute_split_columns(
    predict: Callable[[Leaves, Leaves, int], Any], split: Split, batch_size: int, objective: Objective
) -> dict[str, Tensor]:
    """Run ``predict`` on all samples of a split, and return the objective's columns: a row for each sample.

    Collective: ranks share the batches, and all ranks get all columns. A damaged image counts as the sample that
    replaces the image. For an empty split, returns {}.

    Args:
        predict: Maps a batch's inputs, targets and number of samples to outputs.
        batch_size: Samples of a batch. Each batch is whole on one rank.

    Returns:
        Columns on the CPU in fp64 by name, with one row for each sample in the split's order.

    Raises:
        UserError: Shapes of the columns differ between batches, or a column, loss or weight does not fit the batch.
        RuntimeError: The ranks together did not count each sample exactly once.
    """
    # Columns of this rank's batches, which are whole. On the CPU in buffers that grow: kept tensors would lie between
    # the large tensors of the batches, and prevent the allocator from using memory again.
    buffers, on_device = defaultdict[Key, bytearray](bytearray), list[tuple[Key, Tensor]]()
    with torch.no_grad():  # not inference_mode: training could not use a tensor that a model keeps from an evaluation
        for place, (inputs, targets, _) in split.load_evaluation_batches(batch_size, rank(), world_size()):
            samples = place.stop - place.start
            for part in objective.split_batch(predict(inputs, targets, samples), targets, samples):
                for name, column in compute_batch_columns(objective, *part).items():
                    key = place.start, samples, name, tuple(column.shape[1:])
                    # Copies, because a model may write its next outputs into the same memory.
                    if column.device.type == "cpu":
                        buffers[key] += column.double().numpy().tobytes()
                    else:  # a copy to the host would wait for the device
                        copied = column.double().clone(memory_format=torch.contiguous_format)
                        on_device.append((key, copied))
            del part, column  # before the next outputs are computed
    for key, copied in on_device:
        buffers[key] += copied.cpu().numpy().tobytes()
    by_start = defaultdict[int, dict[str, NDArray[Any]]](dict)
    for (start, samples, name, shape), buffer in buffers.items():
        by_start[start][name] = np.frombuffer(buffer).reshape(samples, *shape)
    parts = sorted(chain.from_iterable(gather_objects([*by_start.items()])), key=itemgetter(0))
    starts = accumulate((len(columns["loss"]) for _, columns in parts), initial=0)
    if [*starts] != [*(start for start, _ in parts), len(split)]:
        raise RuntimeError(f"evaluation did not count each of {len(split)} samples exactly once")
    layouts = [{name: tuple(column.shape[1:]) for name, column in found.items()} for _, found in parts]
    for layout in layouts:
        if layout != layouts[0]:
            raise UserError(
                f"the objective's columns are {layouts[0]} in one batch and {layout} in another: samples must have one "
                "shape in all batches; pad shorter samples"
            )
    names = parts[0][1] if parts else ()
    return {name: torch.from_numpy(np.concatenate([found[name] for _, found in parts])) for name in names}


def measure_split(objective: Objective, columns: dict[str, Tensor]) -> Evaluation:
    """Return the evaluation of a split: the columns, and their measures with the objective's threshold. Collective.

    Rank 0 computes the measures, and sends the measures to all ranks. If the loss is not finite, all other measures are
    NaN. Without columns, no measures are returned.

    Raises:
        UserError: The objective returns other measures than ``measures`` lists. Raised on rank 0 only, while the other
            ranks wait for the measures.
    """
    columns = objective.predict_columns(columns)
    # All ranks use rank 0's measures. Processors of different kinds may add up in different orders, and because of one
    # last bit a rank could stop training while the others continue and wait for it.
    measures: dict[str, float] = {}
    if rank() == 0 and columns:
        loss = mean_loss(columns)
        if math.isfinite(loss):
            with hide_process_group():
                measures = compute_measures(objective, columns)
        else:  # scikit-learn rejects outputs that are not finite, with an error that would hide the cause
            measures = {**dict.fromkeys(objective.order_measures(), math.nan), "loss": loss}
    return Evaluation(broadcast_object(measures), columns, objective.facts.threshold)


def compute_batch_columns(objective: Objective, outputs: Any, targets: Leaves, samples: int) -> dict[str, Tensor]:
    """Return the objective's columns of a batch and the columns ``loss`` and ``weight``, computed in fp64.

    If the objective has weights, ``loss`` is the weighted sum of a sample's losses, and ``weight`` the sum of a
    sample's weights. Otherwise the column ``weight`` is missing.

    Raises:
        UserError: A column, the losses or the weights have no row for each of the ``samples``.
    """
    outputs, compared = (convert_float_tensors(values, torch.float64) for values in (outputs, targets))
    columns = make_loss_columns(objective.losses(outputs, compared), objective.weights(targets), samples)
    for name, column in objective.columns(outputs, compared).items():
        if column.shape[:1] != (samples,):
            raise UserError(
                f"column {name!r} of the objective has shape {list(column.shape)}: must have a row for each of the "
                f"{samples} samples; do not reduce the column"
            )
        columns[name] = column
    return columns


def compute_measures(objective: Objective, columns: dict[str, Tensor]) -> dict[str, float]:
    """Return the objective's measures from ``columns`` (at least one row), the main measure first and the loss last.

    Raises:
        UserError: The objective returns other measures than its ``measures`` names.
    """
    found = objective.measure(columns)
    if found.keys() != objective.measures.keys():
        raise UserError(
            f"{type(objective).__name__}.measure returned {', '.join(found) or 'nothing'}: must be the names in "
            f"measures: {', '.join(objective.measures) or 'nothing'}"
        )
    return {**{name: float(found[name]) for name in objective.order_measures()}, "loss": mean_loss(columns)}


def mean_loss(columns: dict[str, Tensor]) -> float:
    """Return the weighted mean of the column ``loss`` (at least one row), or 0 if all weights are 0."""
    weight = columns["weight"].sum().item() if "weight" in columns else len(columns["loss"])
    return columns["loss"].sum().item() / (weight or 1)


class Selection:
    """The weights to keep and their evaluation, chosen by the validation split alone. Equal on all ranks."""

    def __init__(self, keep: str, patience: int, measure: str = "loss", *, higher_is_better: bool = False) -> None:
        """Start without selected weights.

        Args:
            keep: The hyperparameter. "best" keeps the best weights, and other values keep the newest.
            patience: Evaluations without a better measure after which training stops. 0 means never.
            measure: Name of the validation measure that decides.
            higher_is_better: Whether a higher value of the measure is better.
        """
        self.keep, self.patience, self.measure = keep, patience, measure
        self.sign = -1.0 if higher_is_better else 1.0
        self.best = math.inf  # the measure of the best evaluation, times the sign
        self.evaluations_since_best = 0
        self.stopped = ""  # reason for early stopping; empty: none
        self.epoch = 0  # epochs that were done when the weights were kept; 0: no weights are kept yet
        self.test: Evaluation
        self.weights: dict[str, Tensor]

    def select_weights(self, epoch: int, validation: Evaluation, test: Evaluation, weights: dict[str, Tensor]) -> None:
        """Keep ``weights`` and ``test``. If ``keep`` is "best", keep both only if ``validation`` is the best so far.

        The first call always keeps both. With "best", the weights are copied. Otherwise later steps change the kept
        weights. After ``patience`` evaluations without a better measure, sets ``stopped`` to the reason.

        Args:
            epoch: Number of epochs that are done.
            validation: Evaluation of the validation split.
            test: Evaluation of the test split.
            weights: The state_dict of the evaluated model.
        """
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

    def get_measure_of_kept_weights(self, validation: Evaluation) -> float:
        """Return the validation measure of the weights that :meth:`select_weights` would keep after ``validation``.

        Keeps nothing. If the measure was never defined, the result is not finite.
        """
        found = validation.measures.get(self.measure, math.nan)
        return found if self.keep != "best" or self.sign * found < self.best else self.sign * self.best

    def state_dict(self) -> State:
        return {name: getattr(self, name) for name in SAVED} | {"test": vars(self.test) if self.epoch else None}

    def load_state_dict(self, saved: State, weights: dict[str, Tensor]) -> None:
        """Restore the result of :meth:`state_dict`. ``weights`` are the kept weights, if any were kept."""
        for name in SAVED:
            setattr(self, name, saved[name])
        if self.epoch:
            self.test, self.weights = Evaluation(**saved["test"]), weights
