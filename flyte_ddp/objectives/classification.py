"""One class for each sample: cross-entropy, accuracy."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from flyte_ddp.catalog import OBJECTIVES
from flyte_ddp.errors import UserError
from flyte_ddp.objectives.objective import (
    HIGHER,
    Columns,
    Facts,
    Objective,
    largest_losses,
    overrides,
    require_outputs,
)
from flyte_ddp.objectives.table_columns import TableColumns, name_columns
from flyte_ddp.objectives.terms import Terms
from flyte_ddp.sections import Confusions, Pictures, Section


class Classification(Objective):
    """Targets are class numbers int64 [n], outputs logits [n, classes]."""

    measures: Mapping[str, str] = {"accuracy": HIGHER}
    takes = frozenset(OBJECTIVES["classification"])
    loss_unit = "cross-entropy (nats)"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        if facts.label_smoothing and self.class_weights is not None and not bool(self.class_weights.all()):
            raise UserError(
                f"class_weights={facts.class_weights!r}: with label_smoothing={facts.label_smoothing:g} a weight of 0 "
                "would still count in part; give a small one, or set label_smoothing=0"
            )

    @property
    def has_weights(self) -> bool:
        """Whether there are class weights, or a subclass has weights of its own."""
        return self.class_weights is not None or overrides(self, Classification, "weights")

    def check_targets(self, targets: NDArray[Any]) -> None:
        """Raise UserError unless the targets are whole numbers [N]."""
        if targets.ndim != 1 or targets.dtype.kind not in "iu":
            raise UserError(
                f"objective='classification': the targets are {targets.dtype} {list(targets.shape)}; must be a class "
                "number for each sample; choose another objective, or convert them (astype(int); a column: "
                "ravel(); one-hot: argmax(1))"
            )
        wrong = np.flatnonzero((targets < 0) | (targets >= self.outputs))
        if len(wrong):
            raise UserError(
                f"objective='classification': the class of row {wrong[0]} is {targets[wrong[0]]}: must be "
                f"0..{self.outputs - 1} with {self.outputs} classes"
            )

    def check_outputs(self, model: str, outputs: Any, targets: Tensor) -> None:
        """Raise UserError unless the outputs are logits [n, classes]."""
        shape = len(targets), self.outputs
        require_outputs(model, outputs, shape, "(samples, classes)", "size its last layer by num_classes")

    def weights(self, targets: Tensor) -> Tensor | None:
        """Return each sample's class weight, [n]; None without class weights."""
        return None if self.class_weights is None else self.class_weights_at(targets.device)[targets]

    def losses(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each sample, [n], with label smoothing while torch records gradients."""
        smoothing = self.facts.label_smoothing if torch.is_grad_enabled() else 0.0
        if not smoothing or self.class_weights is None or overrides(self, Classification, "weights"):
            return functional.cross_entropy(outputs, targets, reduction="none", label_smoothing=smoothing)
        # torch weighs the smoothed part by all classes' weights, and not by that of the sample, which comes later.
        weights = self.class_weights_at(outputs.device).to(outputs.dtype)
        losses = functional.cross_entropy(outputs, targets, weights, reduction="none", label_smoothing=smoothing)
        return losses / weights[targets]

    def loss_sum(self, outputs: Any, targets: Tensor, weights: Terms | None, samples: int) -> Tensor:
        """Return the weighted sum of all losses, []; without weights by torch's fused form."""
        if weights is not None or overrides(self, Classification, "losses"):
            return super().loss_sum(outputs, targets, weights, samples)
        smoothing = self.facts.label_smoothing
        return functional.cross_entropy(outputs, targets, reduction="sum", label_smoothing=smoothing)

    def columns(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
        """Return the class of the largest logit, and the true class: ``prediction`` and ``truth`` [n]."""
        return {"prediction": outputs.argmax(1), "truth": targets}

    def measure(self, columns: Columns) -> dict[str, float]:
        """Return the share of correct predictions, 0 to 1."""
        correct = columns["prediction"] == columns["truth"]
        return {"accuracy": correct.sum().item() / max(1, len(correct))}

    def constant_loss(self, columns: Columns) -> float | None:
        """Return the loss of predicting each class by its share of the samples, weighted by any class weights.

        That is the entropy of the shares. None for a subclass with losses or columns of its own.
        """
        if overrides(self, Classification, "losses", "columns"):
            return None
        shares = columns["truth"].long().bincount(columns.get("weight")).double()
        shares /= shares.sum()
        return float(-torch.special.xlogy(shares, shares).sum())

    def scores(self, columns: Columns) -> Tensor:
        """Return 1 for a correct prediction, 0 for a wrong one: [N]."""
        return (columns["prediction"] == columns["truth"]).double()

    def answers(self, outputs: Any) -> TableColumns:
        """Return the likeliest class as ``prediction``, its probability as ``score``, and ``score_<class>`` of each."""
        best, scores, names = outputs.argmax(dim=1).tolist(), outputs.softmax(dim=1), self.facts.classes
        rows = range(len(best))
        return {
            "prediction": [names[place] for place in best],
            "score": scores[rows, best].tolist(),
            **dict(zip(name_columns("score", names), scores.T.tolist(), strict=True)),
        }

    def sections(self, columns: Columns) -> list[Section]:
        """Return the confusions, and pictures of the wrong predictions with the largest loss."""
        truth, prediction = (columns[name].long() for name in ("truth", "prediction"))
        worst = largest_losses(columns, among=truth != prediction)
        text = "The test samples with the largest loss. "
        text += "The score is the probability that the model gave to its prediction."
        if not worst:
            text = "None: all predictions on the test samples are correct."
        return [
            Confusions(self.facts.classes, count_confusions(truth.numpy(), prediction.numpy()).tolist()),
            Pictures("Worst mistakes", text, worst),
        ]


def count_confusions(truth: NDArray[np.int64], predictions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [K, 3]: label, predicted class and number of samples of each pair that occurs, sorted by pair."""
    classes = int(predictions.max(initial=0)) + 1
    pairs, samples = np.unique(truth * classes + predictions, return_counts=True)
    return np.stack((pairs // classes, pairs % classes, samples), axis=1)
