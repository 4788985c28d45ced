"""Objective with one class for each sample: cross-entropy, accuracy and F1.

With two classes, also AUROC and average precision.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from flyte_ddp.catalog import (
    MEASURES,
    OF_TWO_CLASSES,
    SETTINGS_OF_OBJECTIVES,
    check_positives_for_threshold,
    check_two_classes,
)
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.objectives.binary_labels import BinaryLabels
from flyte_ddp.core.objectives.objective import HIGHER, Columns, Facts, Objective, list_largest_losses, overrides
from flyte_ddp.core.objectives.table_columns import TableColumns
from flyte_ddp.core.samples.leaves import Leaves
from flyte_ddp.core.text.formatting import format_percent
from flyte_ddp.core.text.sections import Confusions, Pictures, Section
from flyte_ddp.objectives.class_columns import make_top_columns, make_unique_column_names
from flyte_ddp.objectives.requirements import check_output_shape, check_target_type, check_target_values
from flyte_ddp.objectives.threshold import apply_threshold, fit_threshold, predict_classes
from flyte_ddp.objectives.two_classes import list_second_class_sections

LOGITS_AT_A_TIME = 2**17  # converted to fp64 at a time, so that the copy is small beside a batch


class Classification(Objective):
    """Objective for class numbers int64 [n] as targets, and logits [n, classes] as outputs.

    With two classes, the second class is the positive class. A subclass that overrides none of ``measures``,
    ``measure`` and ``columns`` has all measures of :meth:`measure`.
    """

    measures: Mapping[str, str] = {"accuracy": HIGHER}
    used_hyperparameters = frozenset(SETTINGS_OF_OBJECTIVES["classification"])
    loss_unit = "cross-entropy (nats)"

    def __init__(self, facts: Facts) -> None:
        """Keep ``facts``. Sets ``measures`` to all measures unless a subclass defines them.

        Raises:
            UserError: Label smoothing meets a class weight of 0, or a threshold meets other than two classes.
        """
        super().__init__(facts)
        if not overrides(self, Classification, "measures", "measure", "columns"):
            named = [name for name in MEASURES["classification"] if self.is_binary or name not in OF_TWO_CLASSES]
            self.measures = dict.fromkeys(named, HIGHER)
        if facts.label_smoothing and self.class_weights is not None and not bool(self.class_weights.all()):
            raise UserError(
                f"class_weights={facts.class_weights!r}: with label_smoothing={facts.label_smoothing:g}, a class of "
                "weight 0 would still count in part; give a small weight, or set label_smoothing=0"
            )
        if facts.threshold_rule:
            check_two_classes(facts.threshold_rule, len(facts.classes))
            if overrides(self, Classification, "columns", "answers"):
                what = "not used by user-defined columns or answers"
                raise UserError(f"threshold={facts.threshold_rule!r}: {what}; omit threshold")

    @property
    def is_binary(self) -> bool:
        return len(self.facts.classes) == 2

    def with_fitted_threshold(self, validation: Columns) -> Self:
        """Return a copy of the objective with a threshold that is fitted on the validation split.

        If the hyperparameter ``threshold`` is empty, returns this objective.

        Raises:
            UserError: The validation split has no positive sample, and the threshold is not a fixed probability.
        """
        rule = self.facts.threshold_rule
        if not rule:
            return self
        truth = validation["truth"].numpy() == 1 if validation else np.zeros(0, dtype=np.bool_)
        check_positives_for_threshold(rule, self.facts.classes[1], int(truth.sum()))
        scores = np.nan_to_num(validation["probability"].numpy()) if validation else np.zeros(0)
        return self.with_threshold(fit_threshold(rule, truth, scores))

    @property
    def has_weights(self) -> bool:
        return self.class_weights is not None or overrides(self, Classification, "weights")

    def check_targets(self, targets: NDArray[Any]) -> None:
        """Raise UserError unless ``targets`` [samples] are class numbers from 0 to the number of classes - 1."""
        rule = "a class number for each sample (astype(int); a column: ravel(); one-hot: argmax(1))"
        check_target_type("classification", targets, (1,), "iu", rule)
        rule = f"0..{self.outputs - 1} with {self.outputs} classes"
        check_target_values("classification", targets, lambda part: (part >= 0) & (part < self.outputs), rule)

    def check_outputs(self, model: str, outputs: Any, targets: Tensor) -> None:
        shape = len(targets), self.outputs
        check_output_shape(model, outputs, shape, "(samples, classes)", "size its last layer by num_classes")

    def weights(self, targets: Tensor) -> Tensor | None:
        return None if self.class_weights is None else self.class_weights_at(targets.device)[targets]

    def losses(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each sample, [n]. Class weights are not included, see :meth:`weights`.

        Labels are smoothed only while torch records gradients.
        """
        smoothing = self.facts.label_smoothing if torch.is_grad_enabled() else 0.0
        if not smoothing or self.class_weights is None or overrides(self, Classification, "weights"):
            return functional.cross_entropy(outputs, targets, reduction="none", label_smoothing=smoothing)
        # torch weights the smoothed part by the weights of all classes. The weight of the sample's class is divided
        # out, because loss_sum multiplies by this weight.
        weights = self.class_weights_at(outputs.device).to(outputs.dtype)
        losses = functional.cross_entropy(outputs, targets, weights, reduction="none", label_smoothing=smoothing)
        return losses / weights[targets]

    def loss_sum(self, outputs: Any, targets: Tensor, weights: Tensor | None, samples: int) -> Tensor:
        """Return the weighted sum of the cross-entropy of a batch, as a scalar.

        If ``weights`` is None, labels are always smoothed, unlike in :meth:`losses`.
        """
        if weights is not None or overrides(self, Classification, "losses"):
            return super().loss_sum(outputs, targets, weights, samples)
        smoothing = self.facts.label_smoothing
        return functional.cross_entropy(outputs, targets, reduction="sum", label_smoothing=smoothing)

    def columns(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
        """Return predicted class and true class of each sample, as the columns ``prediction`` and ``truth`` [n].

        With two classes, the column ``probability`` has the probability of the second class.
        """
        found = {"prediction": predict_classes(self, outputs), "truth": targets}
        return {**found, "probability": outputs.softmax(1)[:, 1]} if self.is_binary else found

    def split_batch(self, outputs: Any, targets: Leaves, samples: int) -> Iterator[tuple[Any, Leaves, int]]:
        """Yield the batch in parts of few logits, each as outputs, targets and number of samples.

        If a subclass overrides ``losses``, ``weights`` or ``columns``, yields the whole batch.
        """
        customised = overrides(self, Classification, "losses", "weights", "columns")
        if customised or not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
            yield outputs, targets, samples
            return
        start = 0
        for part in split_logits(outputs):
            yield part, targets[start : start + len(part)], len(part)
            start += len(part)

    def predict_columns(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the columns with ``prediction`` decided by the threshold. Without a threshold, returns ``columns``."""
        threshold = self.facts.threshold
        if threshold is None or not columns:
            return columns
        return {**columns, "prediction": apply_threshold(columns["probability"], threshold).double()}

    def measure(self, columns: Columns) -> dict[str, float]:
        """Return the measures that ``measures`` names, computed as by scikit-learn.

        Balanced accuracy is the mean recall of the classes. With two classes, F1, AUROC and average precision refer to
        the second class. With more classes, F1 is averaged over the classes that occur.
        """
        truth, prediction = (columns[name].long().numpy() for name in ("truth", "prediction"))
        right = truth == prediction
        found = {"accuracy": int(right.sum()) / max(1, len(right))}
        if "probability" in columns and self.is_binary:
            found |= make_second_class_labels(columns).measure()[0]
        else:
            found |= compute_balanced_accuracy_and_f1(truth, prediction)
        return {name: found[name] for name in self.measures if name in found}

    def binary_labels(self, columns: Columns) -> BinaryLabels | None:
        """Return truths, probabilities and predictions of the second of two classes.

        With other than two classes, returns None. Also returns None if a subclass overrides columns and measure.
        """
        customised = overrides(self, Classification, "columns") and overrides(self, Classification, "measure")
        return (
            None
            if customised or "probability" not in columns or not self.is_binary
            else make_second_class_labels(columns)
        )

    def loss_of_best_constant(self, columns: Columns) -> float | None:
        """Return the loss of the best constant prediction: the entropy of the classes' weighted shares of the samples.

        If a subclass overrides ``losses`` or ``columns``, returns None.
        """
        if overrides(self, Classification, "losses", "columns"):
            return None
        shares = columns["truth"].long().bincount(columns.get("weight")).double()
        shares /= shares.sum()
        return float(-torch.special.xlogy(shares, shares).sum())

    def scores(self, columns: Columns) -> Tensor:
        return (columns["prediction"] == columns["truth"]).double()

    def answers(self, outputs: Any) -> TableColumns:
        """Return a table's columns: the class (``prediction``), its probability (``score``), and ``score_<class>``.

        The column ``score_<class>`` exists for each class. With a threshold, the predicted class may be the less likely
        class.
        """
        best, scores, names = predict_classes(self, outputs).tolist(), outputs.softmax(dim=1), self.facts.classes
        rows = range(len(best))
        return {
            "prediction": [names[place] for place in best],
            "score": scores[rows, best].tolist(),
            **dict(zip(make_unique_column_names("score", names), scores.T.tolist(), strict=True)),
        }

    def top_answers(self, outputs: Any, number: int) -> TableColumns:
        """Return columns of the ``number`` likeliest classes: ``top_<rank>`` and ``score_top_<rank>``.

        The columns ``prediction`` and ``score`` are also returned. The first rank is the prediction. With a threshold,
        another class may be likelier.
        """
        best, scores, names = predict_classes(self, outputs), outputs.softmax(dim=1), self.facts.classes
        ranks = scores.nan_to_num(nan=0.0).scatter_(1, best[:, None], 1.5).topk(min(number, len(names))).indices
        found = make_top_columns("", "score", names, scores, ranks)
        return {"prediction": found["top_1"], "score": found["score_top_1"], **found}

    def describe_single_prediction(self, columns: Columns) -> str:
        """Return a sentence for the report if all of two or more samples have the same predicted class, else "".

        If a subclass overrides :meth:`columns`, returns "".
        """
        if overrides(self, Classification, "columns"):
            return ""
        predicted, truth = columns["prediction"], columns["truth"]
        if len(truth) < 2 or bool((predicted != predicted[0]).any()):
            return ""
        name, share = self.facts.classes[int(predicted[0])], format_percent(float((truth == predicted).double().mean()))
        return f"All {len(truth):,} test samples are predicted {name!r}, which is right for {share} of them."

    def sections(self, columns: Columns) -> list[Section]:
        """Return sections of the report: confusions, pictures of the worst mistakes, and sections of two classes."""
        truth, prediction = (columns[name].long() for name in ("truth", "prediction"))
        worst, labels = list_largest_losses(columns, among=truth != prediction), self.binary_labels(columns)
        text = "The test samples with the largest loss. "
        text += "The score is the probability that the model gave to its prediction."
        if not worst:
            text = "None: all predictions on the test samples are correct."
        return [
            Confusions(self.facts.classes, count_confusions(truth.numpy(), prediction.numpy()).tolist()),
            *([] if labels is None else [*labels.draw_curves([""]), *list_second_class_sections(self.facts, columns)]),
            Pictures("Worst mistakes", text, worst),
        ]


def split_logits(logits: Tensor) -> tuple[Tensor, ...]:
    """Split logits [n, classes] into parts of at most 131,072 numbers, or of a single row. The parts are views."""
    return torch.split(logits, max(1, LOGITS_AT_A_TIME // logits.shape[1]))


def make_second_class_labels(columns: Columns) -> BinaryLabels:
    truth, scores, predicted = (columns[name].numpy()[:, None] for name in ("truth", "probability", "prediction"))
    return BinaryLabels(truth, scores, predicted == 1)


def compute_balanced_accuracy_and_f1(truth: NDArray[np.int64], prediction: NDArray[np.int64]) -> dict[str, float]:
    """Return balanced accuracy and F1, averaged over the classes that occur."""
    classes = int(max(truth.max(), prediction.max())) + 1
    counted = truth[truth == prediction], truth, prediction
    right, true, predicted = (np.bincount(each, minlength=classes) for each in counted)
    there = true + predicted > 0
    f1 = 2 * right[there] / (true + predicted)[there]
    return {"balanced_accuracy": float((right[true > 0] / true[true > 0]).mean()), "f1": float(f1.mean())}


def count_confusions(truth: NDArray[np.int64], predictions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the samples of each pair of true class and predicted class.

    Returns:
        [K, 3]: true class, predicted class and number of samples. Only pairs that occur are listed, sorted by pair.
    """
    classes = int(predictions.max(initial=0)) + 1
    pairs, samples = np.unique(truth * classes + predictions, return_counts=True)
    return np.stack((pairs // classes, pairs % classes, samples), axis=1)
