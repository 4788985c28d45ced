"""Exact evaluation on all ranks, and what it decides: which weights are kept, and when training stops early."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from flyte_ddp.loading.split import Split
from flyte_ddp.parallel.distributed import broadcast_object, rank, sum_over_ranks, world_size

SAVED = ("best_loss", "evaluations_since_best", "stopped", "epoch")  # of a Selection, in checkpoints


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one split. The tensors [N] hold one value for each sample, in the split's order, on the CPU."""

    loss: float
    accuracy: float
    losses: Tensor  # fp64
    predictions: Tensor  # int64, as is the truth
    truth: Tensor


def evaluate_split(
    predict: Callable[[Tensor], Tensor], split: Split, batch_size: int, device: torch.device
) -> Evaluation:
    """Return the metrics of a split, equal on all ranks: each rank predicts a part. All ranks must call it.

    ``predict`` maps uint8 images [n, H, W, C] to logits [n, classes], and is called without gradients. The result does
    not depend on the number of ranks. A damaged image counts as the sample that replaces it. Starts to load later
    batches while one is predicted, and fetches remote shards; raises the errors of loading. Raises RuntimeError if a
    sample was not counted exactly once.
    """
    # Fixed whole batches are dealt to the ranks. A sample's loss, prediction, truth and count go to its own column. One
    # rank writes it, so the sum over the ranks is exact.
    table = torch.zeros(4, len(split), dtype=torch.float64, device=device)
    with torch.no_grad():  # not inference_mode: training could not use a tensor that a model keeps from an evaluation
        for place, (pixels, labels, _) in split.load_evaluation_batches(batch_size, rank(), world_size()):
            logits = predict(pixels).double()
            table[0, place] = functional.cross_entropy(logits, labels, reduction="none")
            table[1, place] = logits.argmax(1).double()
            table[2, place] = labels.double()
            table[3, place] += 1
    losses, predictions, truth, counted = sum_over_ranks(table).cpu()
    if not bool((counted == 1).all()):
        raise RuntimeError(f"evaluation counted {int((counted != 1).sum())} of {len(split)} samples not exactly once")
    count = max(1, len(split))
    # All ranks use rank 0's metrics. Processors of different kinds may add up in different orders, and because of one
    # last bit a rank could stop training while the others continue and wait for it.
    own = losses.sum().item() / count, (predictions == truth).sum().item() / count
    return Evaluation(*broadcast_object(own), losses, predictions.long(), truth.long())


def count_confusions(truth: NDArray[np.int64], predictions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [K, 3]: label, predicted class and number of samples of each pair that occurs, sorted by pair."""
    classes = int(predictions.max(initial=0)) + 1
    pairs, samples = np.unique(truth * classes + predictions, return_counts=True)
    return np.stack((pairs // classes, pairs % classes, samples), axis=1)


class Selection:
    """The weights to keep and their evaluation, updated at each evaluation. Equal on all ranks.

    The validation split decides, never the test set.
    """

    def __init__(self, keep: str, patience: int) -> None:
        """Begin with no weights. The arguments are the hyperparameters ``keep`` and ``early_stop_patience``."""
        self.keep, self.patience = keep, patience
        self.best_loss = float("inf")
        self.evaluations_since_best = 0
        self.stopped = ""  # why training stops early; empty: it does not
        self.epoch = 0  # epochs that were done when the weights were kept; 0: none are kept yet
        self.test: Evaluation
        self.weights: dict[str, Tensor]

    def select_weights(self, epoch: int, validation: Evaluation, test: Evaluation, weights: dict[str, Tensor]) -> None:
        """Keep ``weights`` and the evaluation ``test``; with ``keep`` "best" only if the validation loss is the lowest.

        With "best" keeps a copy, otherwise the weights themselves, which go on changing with the model. Sets
        ``stopped`` to the reason after ``patience`` evaluations without a lower loss; never if ``patience`` is 0.
        """
        self.evaluations_since_best += 1
        if better := validation.loss < self.best_loss:
            self.best_loss, self.evaluations_since_best = validation.loss, 0
        if better or self.keep != "best":
            self.weights = copy.deepcopy(weights) if self.keep == "best" else weights
            self.epoch, self.test = epoch, test
        if 0 < self.patience <= self.evaluations_since_best:
            self.stopped = (
                f"after epoch {epoch}: no better validation loss in {self.evaluations_since_best} evaluation(s)"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint's part: everything but the weights, by attribute name (SAVED and ``test``)."""
        return {name: getattr(self, name) for name in SAVED} | {"test": vars(self.test) if self.epoch else None}

    def load_state_dict(self, saved: dict[str, Any], weights: dict[str, Tensor]) -> None:
        """Restore the result of :meth:`state_dict`, and the kept weights."""
        for name in SAVED:
            setattr(self, name, saved[name])
        if self.epoch:
            self.test, self.weights = Evaluation(**saved["test"]), weights
