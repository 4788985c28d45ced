"""The base of objectives: what training minimises, and what evaluations measure."""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map

from flyte_ddp.errors import UserError
from flyte_ddp.objectives.binary_labels import BinaryLabels
from flyte_ddp.objectives.requirements import require_losses, require_weights
from flyte_ddp.objectives.table_columns import TableColumns, number_columns
from flyte_ddp.samples.leaves import Leaves
from flyte_ddp.text.sections import Pictures, Section

LOWER, HIGHER = "lower", "higher"  # whether a lower or a higher value of a measure is better
Columns = Mapping[str, Tensor]
PICTURED = 16  # samples of a section


@dataclass(frozen=True)
class Facts:
    """What an objective knows of its data set and of its hyperparameters."""

    classes: tuple[str, ...] = ()  # or labels; empty for numbers
    target_shape: tuple[int, ...] = ()  # of the target of one sample
    class_counts: tuple[int, ...] = ()  # training samples of each class; empty: not known
    class_weights: str = ""  # the hyperparameter, as is label_smoothing
    label_smoothing: float = 0.0
    no_nan_targets: bool = False  # whether it is known that no target holds a NaN
    select_by: str = "loss"  # the hyperparameter; a measure that it names is the main one
    threshold_rule: str = ""  # the hyperparameter threshold
    threshold: float | None = None  # from which probability the second of two classes is predicted; None: the likelier


class Objective:
    """What training minimises and evaluations measure; the base class of the user's own objectives.

    An objective never reduces, and keeps no state: it returns one loss for each sample, or for each element of a
    sample's target. The library adds them up and divides by the sum of their weights in the whole step, over all ranks.
    """

    # The names of what :meth:`measure` returns, each with LOWER or HIGHER; the main one first. "loss" is added to all.
    measures: Mapping[str, str] = {}
    loss_unit: str = "loss"  # what a loss is, on the axis of the report's chart
    counts_tokens: ClassVar[bool] = False  # whether the weights are a number of tokens, whose rate is then shown
    # Whether a sample's loss depends on others of its batch. Then batches in parts, and mixup, are refused.
    coupled: ClassVar[bool] = False
    takes: ClassVar[frozenset[str]] = frozenset()  # those hyperparameters that this objective uses and others refuse

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.saw_reduced_loss = False  # whether a loss was a single number for all samples
        self.class_weights = class_weights_of(facts) if "class_weights" in self.takes else None  # [classes]

    @property
    def main_measure(self) -> str:
        """The measure that ``select_by`` names, else the first one; "loss" without any."""
        chosen = self.facts.select_by
        return chosen if chosen in self.measures else next(iter(self.measures), "loss")

    def order_measures(self) -> list[str]:
        """Return the names of the measures, the main one first."""
        return sorted(self.measures, key=lambda name: name != self.main_measure)

    @property
    def outputs(self) -> int:
        """The size of the model's last layer; by default the numbers in a target, or the classes if there are any."""
        return len(self.facts.classes) or int(np.prod(self.facts.target_shape))

    @property
    def has_weights(self) -> bool:
        """Whether :meth:`weights` returns weights; by default whether the class overrides it."""
        return type(self).weights is not Objective.weights

    def check_targets(self, targets: NDArray[Any]) -> None:
        """Raise UserError if targets [N, ...] of the data set are not what this objective takes."""

    def check_outputs(self, model: str, outputs: Any, targets: Any) -> None:
        """Raise UserError if the outputs of the model called ``model`` do not fit the targets [n, ...]."""

    def weights(self, targets: Any) -> Tensor | None:  # noqa: ARG002
        """Return the weights of the losses, of their shape and at least 0; None: each loss has the weight 1.

        They must depend on the targets alone, because they are needed before the forward pass; ``across_ranks`` belongs
        in :meth:`losses`.
        """
        return None

    def class_weights_at(self, device: torch.device) -> Tensor:
        """Return ``class_weights``, which is not None, on a device, and keep it there: a copy makes the host wait."""
        assert self.class_weights is not None
        self.class_weights = self.class_weights.to(device)
        return self.class_weights

    def losses(self, outputs: Any, targets: Any) -> Tensor:
        """Return the loss of each sample, [n], or of each element of its target, in fp32 or more.

        A loss whose weight is 0 must still be a number. A single number counts as the mean of these samples.
        """
        raise NotImplementedError("define losses(self, outputs, targets)")

    def loss_sum(self, outputs: Any, targets: Leaves, weights: Tensor | None, samples: int) -> Tensor:
        """Return the weighted sum of all losses of a batch, []. Override it for a fused form of the same value."""
        losses = self.losses(outputs, targets)
        require_losses(losses, weights, samples)
        if losses.dim() == 0:
            self.saw_reduced_loss = True
            return losses * (samples if weights is None else weights.sum())
        return (losses if weights is None else losses * weights).sum()

    def columns(self, outputs: Any, targets: Any) -> dict[str, Tensor]:  # noqa: ARG002
        """Return what :meth:`measure` needs of each sample: tensors [n] or [n, k]. The library adds loss and weight."""
        return {}

    def measure(self, columns: Columns) -> dict[str, float]:  # noqa: ARG002
        """Return the measures by name, from the columns [N] or [N, k] of all samples, fp64; called on rank 0 alone.

        NaN for a measure that these samples do not define.
        """
        return {}

    def loss_of_best_constant(self, columns: Columns) -> float | None:  # noqa: ARG002
        """Return the loss of the best constant output on these samples; None if it is not known."""
        return None

    def binary_labels(self, columns: Columns) -> BinaryLabels | None:  # noqa: ARG002
        """Return the labels that samples have or not, as :meth:`measure` counts them; None if there are none."""
        return None

    def scores(self, columns: Columns) -> Tensor:
        """Return each sample's score, [N], by which the gate compares models; more is better. By default minus loss.

        Where a class defines measures but no scores, the gate makes scores of the first measure instead.
        """
        return -mean_losses(columns)

    def hide_padding(self, outputs: Any, targets: Any) -> Any:  # noqa: ARG002
        """Return outputs as ``answers`` gets them: without what depends on the longest sample of the batch."""
        return outputs

    def answers(self, outputs: Any) -> TableColumns:
        """Return what the model says of n samples, as columns of a table: texts or numbers by the column's name.

        By default the outputs: ``output``, or ``output_0``, ... The columns ``prediction``, or ``prediction_...``, and
        ``score``, a probability, are also shown below pictures.
        """
        return number_columns("output", outputs)

    def top_answers(self, outputs: Any, number: int) -> TableColumns:  # noqa: ARG002
        """Return the answers with columns for the ``number`` likeliest classes only, where all would be many."""
        return self.answers(outputs)

    def truths(self, targets: Leaves) -> TableColumns:
        """Return the targets [n, ...] as columns of a table, which begin with ``truth``: class names or numbers."""
        numbers = isinstance(targets, Tensor) and targets.dim() == 1 and not targets.is_floating_point()
        if numbers and self.facts.classes:
            return {"truth": [self.facts.classes[target] for target in targets.tolist()]}
        return number_columns("truth", targets)

    def top_truths(self, targets: Any, number: int) -> TableColumns:  # noqa: ARG002
        """Return the truths that stand beside ``top_answers``."""
        return self.truths(targets)

    def masks(self, outputs: Any) -> Tensor | None:  # noqa: ARG002
        """Return the predicted class of each pixel, [n, H, W]; None unless the outputs are of pixels."""
        return None

    def sections(self, columns: Columns) -> list[Section]:
        """Return sections of the report from the columns of the test split; by default its largest losses' pictures."""
        return [Pictures("Largest losses", "The test samples with the largest loss.", largest_losses(columns))]


def mean_losses(columns: Columns) -> Tensor:
    """Return the loss of each sample, [N]: the weighted mean over its target; 0 without any weight."""
    weight = columns.get("weight")
    return columns["loss"] if weight is None else columns["loss"] / weight.clamp(min=1e-300)


def largest_losses(columns: Columns, among: Tensor | None = None) -> list[int]:
    """Return the places of up to 16 samples with weight that the mask ``among`` [N] selects, the largest loss first."""
    losses = mean_losses(columns)
    counts = columns["weight"] > 0 if "weight" in columns else torch.ones_like(losses, dtype=torch.bool)
    counts = counts if among is None else counts & among
    chosen: list[int] = torch.where(counts, losses, -torch.inf).topk(min(PICTURED, int(counts.sum()))).indices.tolist()
    return chosen


def overrides(objective: Objective, base: type[Objective], *methods: str) -> bool:
    return any(getattr(type(objective), name) is not getattr(base, name) for name in methods)


def convert_outputs(outputs: Any, dtype: torch.dtype) -> Any:
    """Return a model's outputs with floating-point tensors in at least this type; other values are unchanged."""
    if isinstance(outputs, Tensor) and outputs.dtype == dtype:  # the usual case, without the search for tensors
        return outputs
    return map_floats(outputs, lambda values: values.to(torch.promote_types(values.dtype, dtype)))


def map_floats(outputs: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of a model's outputs with ``function`` applied to each floating-point tensor, however nested."""

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(value) if value.is_floating_point() else value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            copied = copy.copy(value)
            for field in dataclasses.fields(value):
                object.__setattr__(copied, field.name, map_floats(getattr(value, field.name), function))
            return copied
        return value

    return convert(outputs) if isinstance(outputs, Tensor) else tree_map(convert, outputs)


def list_floats(outputs: Any) -> list[Tensor]:
    """Return the floating-point tensors of a model's outputs, in their order, wherever map_floats finds them."""
    found: list[Tensor] = []

    def keep(values: Tensor) -> Tensor:
        found.append(values)
        return values

    map_floats(outputs, keep)
    return found


def loss_columns(losses: Tensor, weights: Tensor | None, samples: int) -> dict[str, Tensor]:
    """Return ``loss`` [samples]; with weights the weighted sum for each sample, and as ``weight`` the weights' sum."""
    require_weights(weights, samples)
    require_losses(losses, weights, samples)
    if weights is None:
        return {"loss": losses.expand(samples)}
    columns = {"loss": losses * weights, "weight": weights}
    return {name: values.reshape(samples, -1).sum(1, dtype=torch.float64) for name, values in columns.items()}


def class_weights_of(facts: Facts) -> Tensor | None:
    """Return ``class_weights`` as numbers fp32 [classes], None if it is empty; "balanced" as scikit-learn does it."""
    text = facts.class_weights
    if not text:
        return None
    number = len(facts.classes) or int(np.prod(facts.target_shape))  # labels need no names
    if number == 1:
        raise UserError(
            f"class_weights={text!r}: weighs classes or labels against each other, and there is one; leave it out; for "
            "positive samples that count more, override weights of Multilabel"
        )
    if text == "balanced":
        counts = torch.tensor(facts.class_counts, dtype=torch.float64)
        if len(counts) != number or not bool((counts > 0).all()):
            raise UserError(
                "class_weights='balanced': a class has no training sample, or their numbers are not known, as of what "
                "`sample` makes and of sets on demand; give numbers, such as 1,2.5"
            )
        return (counts.sum() / (number * counts)).float()
    weights = [float(part) for part in text.split(",")]  # as config has checked
    if len(weights) != number:
        raise UserError(
            f"class_weights={text!r}: has {len(weights)} numbers; there are {number} classes: give one for each"
        )
    return torch.tensor(weights)


def mean_of_defined(values: list[float]) -> float:
    defined = [value for value in values if not math.isnan(value)]
    return float(np.mean(defined)) if defined else float("nan")
