"""Which weights to keep, and when to stop: decided by the validation split, never by the test set."""

import copy
from typing import Any

from torch import Tensor

from flyte_ddp.training.evaluate import Evaluation

SAVED = ("best_loss", "evaluations_since_best", "stopped", "epoch")


class Selection:
    """The weights to keep and their evaluation, updated at every evaluation; equal on all ranks."""

    def __init__(self, keep: str, patience: int) -> None:
        """``keep`` and ``patience`` are the hyperparameters ``keep`` and ``early_stop_patience``."""
        self.keep, self.patience = keep, patience
        self.best_loss = float("inf")
        self.evaluations_since_best = 0
        self.stopped = ""  # why training stops early
        self.epoch = 0
        self.test: Evaluation
        self.weights: dict[str, Tensor]

    def consider(self, epoch: int, validation: Evaluation, test: Evaluation, weights: dict[str, Tensor]) -> None:
        """Keep these weights if they are the ones to keep; set ``stopped`` if training is to end after this epoch."""
        better = validation.loss < self.best_loss
        if better:
            self.best_loss, self.evaluations_since_best = validation.loss, 0
        else:
            self.evaluations_since_best += 1
        if better or self.keep != "best":
            # Training continues to change these tensors; only `best` must outlive that.
            self.weights = copy.deepcopy(weights) if self.keep == "best" else weights
            self.epoch, self.test = epoch, test
        if 0 < self.patience <= self.evaluations_since_best:
            self.stopped = (
                f"after epoch {epoch}: no better validation loss in {self.evaluations_since_best} evaluation(s)"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return all but the weights, for a checkpoint."""
        return {name: getattr(self, name) for name in SAVED} | {"test": vars(self.test) if self.epoch else None}

    def load_state_dict(self, saved: dict[str, Any], weights: dict[str, Tensor]) -> None:
        """Restore what :meth:`state_dict` returned, with the weights that were kept."""
        for name in SAVED:
            setattr(self, name, saved[name])
        if self.epoch:
            self.test, self.weights = Evaluation(**saved["test"]), weights
