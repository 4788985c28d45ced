"""Which weights to keep, and when to stop: decided by the validation split, never by the test set."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from torch import Tensor

from flyte_ddp.config import Hyperparameters
from flyte_ddp.evaluate import Evaluation

if TYPE_CHECKING:
    from flyte_ddp.training_state import TrainingState


class Selection:
    """The weights to keep with their evaluation, updated at every evaluation; equal on all ranks."""

    def __init__(self, hp: Hyperparameters) -> None:
        self.hp = hp
        self.best_loss = float("inf")
        self.evaluations_since_best = 0
        self.stopped = ""
        self.epoch = 0
        self.test: Evaluation
        self.weights: dict[str, Tensor]

    def consider(self, epoch: int, validation: Evaluation, test: Evaluation, state: TrainingState) -> bool:
        """Takes in an evaluation after ``epoch`` epochs; returns whether training should stop early."""
        better = validation.loss < self.best_loss
        if better:
            self.best_loss, self.evaluations_since_best = validation.loss, 0
        else:
            self.evaluations_since_best += 1
        if better or self.hp.keep != "best":
            weights = state.kept_model().state_dict()
            # Training goes on changing these tensors; only `best` must outlive that.
            self.weights = copy.deepcopy(weights) if self.hp.keep == "best" else weights
            self.epoch, self.test = epoch, test
        if 0 < self.hp.early_stop_patience <= self.evaluations_since_best:
            self.stopped = (
                f"after epoch {epoch}: no better validation loss in {self.evaluations_since_best} evaluation(s)"
            )
        return bool(self.stopped)
