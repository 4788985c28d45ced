"""The base class of objectives, and functions that objectives share."""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.objectives.binary_labels import BinaryLabels
from flyte_ddp.core.objectives.requirements import check_loss_shape, check_loss_weights
from flyte_ddp.core.objectives.table_columns import TableColumns, make_number_columns
from flyte_ddp.core.samples.leaves import Leaves
from flyte_ddp.core.text.sections import Pictures, Section

LOWER, HIGHER = "lower", "higher"  # whether a lower or a higher value of a measure is better
Columns = Mapping[str, Tensor]
PICTURED = 16  # samples of a section


@dataclass(frozen=True)
class Facts:
    """The properties of data set and hyperparameters that an objective needs."""

    classes: tuple[str, ...] = ()  # or labels; empty for numbers
    target_shape: tuple[int, ...] = ()  # of the target of one sample
    class_counts: tuple[int, ...] = ()  # training samples of each class; empty: not known
    class_weights: str = ""  # the hyperparameter, as is label_smoothing
    label_smoothing: float = 0.0
    no_nan_targets: bool = False  # whether it is known that no target holds a NaN
    select_by: str = "loss"  # the hyperparameter; a measure of this name is the main measure
    threshold_rule: str = ""  # the hyperparameter threshold
    threshold: float | None = None  # from which the second of two classes is predicted; None: likelier class


class Objective:
    """Base class of objectives, which define the loss of training and the measures of evaluations.

    User-defined objectives derive from this class. An objective does not reduce losses, and keeps no state. The method
    ``losses`` returns a loss for each sample, or for each element of a sample's target. The library adds up the losses
    of the whole step, over all ranks, and divides by the sum of the weights.
    """

    # Names of the measures, each with LOWER or HIGHER, the main measure first. The library adds "loss".
    measures: Mapping[str, str] = {}
    loss_unit: str = "loss"  # name of a loss, on the axis of the report's chart
    counts_tokens: ClassVar[bool] = False  # whether weights count tokens; then tokens per second are shown
    # Whether a sample's loss depends on other samples of the batch. Batches in parts, and mixup, are then rejected.
    compares_samples: ClassVar[bool] = False
    used_hyperparameters: ClassVar[frozenset[str]] = (
        frozenset()
    )  # hyperparameters that this objective uses, and others reject

    def __init__(self, facts: Facts) -> None:
        """Keep ``facts``, and parse the class weights if this objective uses them.

        Raises:
            UserError: The class weights do not fit the classes.
        """
        self.facts = facts
        self.saw_reduced_loss = False  # whether a loss was a single number for all samples
        self.class_weights = (
            parse_class_weights(facts) if "class_weights" in self.used_hyperparameters else None
        )  # [classes]

    @property
    def main_measure(self) -> str:
        """The measure that ``select_by`` names, else the first measure. Without measures, "loss"."""
        chosen = self.facts.select_by
        return chosen if chosen in self.measures else next(iter(self.measures), "loss")

    def order_measures(self) -> list[str]:
        """Return the names of the measures, the main measure first."""
        return sorted(self.measures, key=lambda name: name != self.main_measure)

    @property
    def outputs(self) -> int:
        """The size of the model's last layer.

        By default the number of classes or, without classes, the number of elements in a target.
        """
        return len(self.facts.classes) or int(np.prod(self.facts.target_shape))

    def with_threshold(self, threshold: float | None) -> Self:
        """Return a copy of this objective with another threshold, or this objective if the threshold is equal.

        A threshold of None predicts the likelier class.
        """
        if self.facts.threshold == threshold:
            return self
        copied = copy.copy(self)
        copied.facts = dataclasses.replace(self.facts, threshold=threshold)
        return copied

    def with_fitted_threshold(self, validation: Columns) -> Self:  # noqa: ARG002
        """Return a copy of the objective with a threshold fitted on the validation split. By default returns itself.

        Raises:
            UserError: The rule of the threshold cannot be fitted on this split.
        """
        return self

    @property
    def has_weights(self) -> bool:
        """Whether :meth:`weights` returns weights. By default whether the class overrides :meth:`weights`."""
        return type(self).weights is not Objective.weights

    def check_targets(self, targets: NDArray[Any]) -> None:
        """Raise UserError if this objective does not accept targets [N, ...] of the data set."""

    def check_outputs(self, model: str, outputs: Any, targets: Any) -> None:
        """Raise UserError if the outputs do not fit the targets [n, ...]. ``model`` is the name in the error."""

    def weights(self, targets: Any) -> Tensor | None:  # noqa: ARG002
        """Return the weights of the losses, in the shape of the losses, or None for weights of 1.

        By default returns None. Weights are at least 0. Weights must depend on the targets alone, because weights are
        needed before the forward pass. ``across_ranks`` may be called in :meth:`losses`, not here.
        """
        return None

    def class_weights_at(self, device: torch.device) -> Tensor:
        """Move ``class_weights``, which must not be None, to a device, and return the weights.

        The weights stay on the device, because each copy makes the host wait.
        """
        assert self.class_weights is not None
        self.class_weights = self.class_weights.to(device)
        return self.class_weights

    def losses(self, outputs: Any, targets: Any) -> Tensor:
        """Return the loss of each sample, [n], or of each element of the targets, in fp32 or more.

        A loss whose weight is 0 must still be finite. A single number counts as the mean of the samples.
        """
        raise NotImplementedError("define losses(self, outputs, targets)")

    def loss_sum(self, outputs: Any, targets: Leaves, weights: Tensor | None, samples: int) -> Tensor:
        """Return the weighted sum of all losses of a batch, as a scalar.

        Override this method for a fused computation of the same value. If the losses are a single number, sets
        ``saw_reduced_loss``, and counts the number as the mean.

        Args:
            outputs: The model's outputs, with floats in fp32 or more.
            targets: The targets.
            weights: The result of :meth:`weights` for these targets.
            samples: Number of samples in the batch.

        Raises:
            UserError: The losses do not have the shape of the weights, or without weights [samples].
        """
        losses = self.losses(outputs, targets)
        check_loss_shape(losses, weights, samples)
        if losses.dim() == 0:
            self.saw_reduced_loss = True
            return losses * (samples if weights is None else weights.sum())
        return (losses if weights is None else losses * weights).sum()

    def columns(self, outputs: Any, targets: Any) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the columns that :meth:`measure` needs: tensors [n] or [n, k] by name.

        The library adds the columns ``loss`` and ``weight``.
        """
        return {}

    def split_batch(self, outputs: Any, targets: Leaves, samples: int) -> Iterator[tuple[Any, Leaves, int]]:
        """Divide a batch into parts, so that :meth:`columns` needs less memory. By default yields the whole batch.

        Each part is outputs, targets and number of samples.
        """
        yield outputs, targets, samples

    def predict_columns(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the columns with the predictions of this objective's threshold. By default returns ``columns``."""
        return columns

    def measure(self, columns: Columns) -> dict[str, float]:  # noqa: ARG002
        """Compute the measures, such as the accuracy, from the columns of all samples. Called on rank 0 only.

        Columns are fp64, [N] or [N, k]. If the samples do not define a measure, the value is NaN.
        """
        return {}

    def loss_of_best_constant(self, columns: Columns) -> float | None:  # noqa: ARG002
        """Return the loss of the best constant output on these samples, or None if unknown."""
        return None

    def binary_labels(self, columns: Columns) -> BinaryLabels | None:  # noqa: ARG002
        """Return truths, probabilities and predictions of binary labels, from which :meth:`measure` computes.

        Returns None if the objective has no binary labels.
        """
        return None

    def scores(self, columns: Columns) -> Tensor:
        """Return the score of each sample, [N], by which the release gate compares models.

        Higher is better. The default is minus the sample's mean loss. If a class defines measures but no scores, the
        gate computes scores from the first measure.
        """
        return -compute_mean_losses(columns)

    def hide_padding(self, outputs: Any, targets: Any) -> Any:  # noqa: ARG002
        """Return the outputs for :meth:`answers`, without values at padding of shorter samples.

        By default returns the outputs unchanged.
        """
        return outputs

    def answers(self, outputs: Any) -> TableColumns:
        """Return the model's answers for n samples as columns of a table: texts or numbers by column name.

        The default columns hold the outputs: ``output``, or ``output_0``, ``output_1`` and so on. More than 1,000
        outputs give no columns. The columns ``prediction``, or ``prediction_...``, and ``score``, a probability, are
        also shown below pictures.
        """
        return make_number_columns("output", outputs)

    def top_answers(self, outputs: Any, number: int) -> TableColumns:  # noqa: ARG002
        """Return the columns of :meth:`answers` for only the ``number`` likeliest classes. By default all columns.

        The library calls this method if columns for all classes would be too many.
        """
        return self.answers(outputs)

    def truths(self, targets: Leaves) -> TableColumns:
        """Return the targets [n, ...] as columns of a table: class names or numbers.

        Names of the columns begin with ``truth``. More than 1,000 numbers of a sample give no columns.
        """
        numbers = isinstance(targets, Tensor) and targets.dim() == 1 and not targets.is_floating_point()
        if numbers and self.facts.classes:
            return {"truth": [self.facts.classes[target] for target in targets.tolist()]}
        return make_number_columns("truth", targets)

    def top_truths(self, targets: Any, number: int) -> TableColumns:  # noqa: ARG002
        """Return the truths that a table shows beside :meth:`top_answers`. The default returns all truths."""
        return self.truths(targets)

    def masks(self, outputs: Any) -> Tensor | None:  # noqa: ARG002
        """Return the predicted class of each pixel, [n, H, W], or None if outputs are not for pixels."""
        return None

    def describe_single_prediction(self, columns: Columns) -> str:  # noqa: ARG002
        """Return a sentence for the report if all samples have the same prediction, else "". By default ""."""
        return ""

    def describe_wrong_targets(self, inputs: Leaves, targets: Leaves) -> str:  # noqa: ARG002
        """Return a warning if a batch's targets do not fit the inputs, else "". By default ""."""
        return ""

    def sections(self, columns: Columns) -> list[Section]:
        """Return sections of the report from the columns of the test split.

        By default the pictures of the samples with the largest losses.
        """
        return [Pictures("Largest losses", "The test samples with the largest loss.", list_largest_losses(columns))]


def compute_mean_losses(columns: Columns) -> Tensor:
    """Return the mean loss of each sample, [N], from the columns ``loss`` and ``weight``. 0 if a weight is 0."""
    weight = columns.get("weight")
    return columns["loss"] if weight is None else columns["loss"] / weight.clamp(min=1e-300)


def list_largest_losses(columns: Columns, among: Tensor | None = None) -> list[int]:
    """Return the positions of up to 16 samples with the largest losses, the largest first.

    Samples with weight 0 are skipped, and samples where the mask ``among`` [N] is False.
    """
    losses = compute_mean_losses(columns)
    counts = columns["weight"] > 0 if "weight" in columns else torch.ones_like(losses, dtype=torch.bool)
    counts = counts if among is None else counts & among
    chosen: list[int] = torch.where(counts, losses, -torch.inf).topk(min(PICTURED, int(counts.sum()))).indices.tolist()
    return chosen


def overrides(objective: Objective, base: type[Objective], *methods: str) -> bool:
    """Return whether the objective's class overrides any of the methods of ``base``."""
    return any(getattr(type(objective), name) is not getattr(base, name) for name in methods)


def convert_float_tensors(outputs: Any, dtype: torch.dtype) -> Any:
    """Return a model's outputs with floating-point tensors converted to ``dtype``. Wider types are kept.

    Tensors are found in nested containers and dataclasses, which are copied. Other values are unchanged.
    """
    if isinstance(outputs, Tensor) and outputs.dtype == dtype:  # the usual case, which needs no search for tensors
        return outputs
    return map_float_tensors(outputs, lambda values: values.to(torch.promote_types(values.dtype, dtype)))


def map_float_tensors(outputs: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of a model's outputs with ``function`` applied to each floating-point tensor, however nested."""

    def convert(value: Any) -> Any:
        """Apply ``function`` to a tensor of floats, or to the fields of a dataclass in a copy. Return other values."""
        if isinstance(value, Tensor):
            return function(value) if value.is_floating_point() else value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            copied = copy.copy(value)
            for field in dataclasses.fields(value):
                object.__setattr__(copied, field.name, map_float_tensors(getattr(value, field.name), function))
            return copied
        return value

    return convert(outputs) if isinstance(outputs, Tensor) else tree_map(convert, outputs)


def list_float_tensors(outputs: Any) -> list[Tensor]:
    """Return the floating-point tensors of a model's outputs, in order, however nested."""
    found: list[Tensor] = []

    def keep(values: Tensor) -> Tensor:
        found.append(values)
        return values

    map_float_tensors(outputs, keep)
    return found


def make_loss_columns(losses: Tensor, weights: Tensor | None, samples: int) -> dict[str, Tensor]:
    """Return the column ``loss`` [samples] and, if ``weights`` are given, the column ``weight`` [samples].

    With weights, ``loss`` is the weighted sum of a sample's losses, and ``weight`` the sum of a sample's weights. If
    ``losses`` is a single number, all samples get this loss.

    Raises:
        UserError: Losses or weights have no row for each of the ``samples``, or weights are negative or not finite.
    """
    check_loss_weights(weights, samples)
    check_loss_shape(losses, weights, samples)
    if weights is None:
        return {"loss": losses.expand(samples)}
    columns = {"loss": losses * weights, "weight": weights}
    return {name: values.reshape(samples, -1).sum(1, dtype=torch.float64) for name, values in columns.items()}


def parse_class_weights(facts: Facts) -> Tensor | None:
    """Return the class weights that the hyperparameter ``class_weights`` gives, fp32 [classes], or None if empty.

    "balanced" is as in scikit-learn: the number of all samples, divided by the number of classes and by the samples of
    the class.

    Raises:
        UserError: The weights do not fit the classes, or there is one class, or "balanced" lacks the class counts.
    """
    text = facts.class_weights
    if not text:
        return None
    number = len(facts.classes) or int(np.prod(facts.target_shape))  # labels need no names
    if number == 1:
        raise UserError(
            f"class_weights={text!r}: needs at least two classes or labels, and there is one; remove class_weights; to "
            "give positive samples more weight, override weights of Multilabel"
        )
    if text == "balanced":
        counts = torch.tensor(facts.class_counts, dtype=torch.float64)
        if len(counts) != number or not bool((counts > 0).all()):
            raise UserError(
                "class_weights='balanced': a class has no training sample, or the class counts are unknown (with "
                "`sample`, or a data set on demand); give numbers, such as 1,2.5"
            )
        return (counts.sum() / (number * counts)).float()
    weights = [float(part) for part in text.split(",")]  # as config has checked
    if len(weights) != number:
        raise UserError(f"class_weights={text!r}: has {len(weights)} numbers: must be {number}, one for each class")
    return torch.tensor(weights)


def compute_mean_without_nan(values: list[float]) -> float:
    """Return the mean of the values that are not NaN, or NaN if there are none."""
    defined = [value for value in values if not math.isnan(value)]
    return float(np.mean(defined)) if defined else float("nan")
