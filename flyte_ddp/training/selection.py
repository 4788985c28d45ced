"""Which weights are kept, and when training stops early. The validation split decides, never the test set."""

import copy
from typing import Any

from torch import Tensor

from flyte_ddp.training.evaluate import Evaluation

SAVED = ("best_loss", "evaluations_since_best", "stopped", "epoch")


class Selection:
    """The weights to keep and their evaluation, updated at each evaluation. Equal on all ranks."""

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
        """Keep these weights if ``keep`` says so; set ``stopped`` if training must end after this epoch.

        With ``keep`` "best" keeps a copy of the weights with the lowest validation loss, else the newest weights
        themselves.
        """
        better = validation.loss < self.best_loss
        if better:
            self.best_loss, self.evaluations_since_best = validation.loss, 0
        else:
            self.evaluations_since_best += 1
        if better or self.keep != "best":
            # Training changes these tensors. "best" needs a copy; the newest weights may change with the model.
            self.weights = copy.deepcopy(weights) if self.keep == "best" else weights
            self.epoch, self.test = epoch, test
        if 0 < self.patience <= self.evaluations_since_best:
            self.stopped = (
                f"after epoch {epoch}: no better validation loss in {self.evaluations_since_best} evaluation(s)"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint's part: everything but the weights."""
        return {name: getattr(self, name) for name in SAVED} | {"test": vars(self.test) if self.epoch else None}

    def load_state_dict(self, saved: dict[str, Any], weights: dict[str, Tensor]) -> None:
        """Restore the result of :meth:`state_dict`, and the kept weights."""
        for name in SAVED:
            setattr(self, name, saved[name])
        if self.epoch:
            self.test, self.weights = Evaluation(**saved["test"]), weights
