"""Objective with several labels for each sample: binary cross-entropy, F1, AUROC and other measures."""

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from flyte_ddp.catalog import MEASURES, SETTINGS_OF_OBJECTIVES
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.objectives.binary_labels import BinaryLabels
from flyte_ddp.core.objectives.objective import HIGHER, Columns, Objective, compute_mean_without_nan, overrides
from flyte_ddp.core.objectives.table_columns import TableColumns
from flyte_ddp.core.text.formatting import join_first
from flyte_ddp.core.text.sections import Section, Table
from flyte_ddp.objectives.class_columns import make_top_columns, make_unique_column_names
from flyte_ddp.objectives.requirements import check_output_shape, check_target_type, check_target_values

THRESHOLD = 0.5  # probability from which a label counts as predicted


class Multilabel(Objective):
    """Objective for float targets [n, labels] of 0 and 1, and logits [n, labels] as outputs.

    The target of an unknown label is NaN.
    """

    measures: Mapping[str, str] = dict.fromkeys(MEASURES["multilabel"], HIGHER)
    used_hyperparameters = frozenset(SETTINGS_OF_OBJECTIVES["multilabel"])
    loss_unit = "binary cross-entropy (nats)"

    def check_targets(self, targets: NDArray[Any]) -> None:
        """Raise UserError unless ``targets`` are floats [samples, labels] of 0, 1 and NaN (unknown).

        If class names are given, also raises UserError unless each label has a name.
        """
        rule = "float [samples, labels] of 0 and 1, or NaN for unknown (astype('float32'))"
        check_target_type("multilabel", targets, (2,), "f", rule)
        if len(self.facts.classes) not in (0, targets.shape[1]):
            raise UserError(
                f"the targets have {targets.shape[1]} labels, but there are {len(self.facts.classes)} class names: "
                "give one name for each label, or no names"
            )
        rule = "0, 1, or NaN for unknown"
        check_target_values("multilabel", targets, lambda part: np.isnan(part) | (part == 0) | (part == 1), rule)

    def check_outputs(self, model: str, outputs: Any, targets: Tensor) -> None:
        fix = "size its last layer by num_classes"
        check_output_shape(model, outputs, tuple(targets.shape), "(samples, classes)", fix)

    def weights(self, targets: Tensor) -> Tensor:
        known = (~targets.isnan()).to(torch.float32)
        return known if self.class_weights is None else known * self.class_weights_at(targets.device)

    def losses(self, outputs: Any, targets: Tensor) -> Tensor:
        # Unknown labels are replaced, because NaN times a weight of 0 is NaN.
        """Return the binary cross-entropy of each label, [n, labels]. Unknown labels get the loss of the label 0."""
        known = targets.nan_to_num(nan=0.0).to(outputs.dtype)
        return functional.binary_cross_entropy_with_logits(outputs, known, reduction="none")

    def columns(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
        return {"probability": outputs.sigmoid(), "truth": targets}

    def measure(self, columns: Columns) -> dict[str, float]:
        """Return the measures that ``measures`` names: macro averages over the labels, computed as by scikit-learn.

        A label without a known positive sample is skipped. AUROC and balanced accuracy also skip labels without a
        negative sample. If all labels are skipped, the measure is NaN.
        """
        rows = make_binary_labels(columns).measure()
        named = [name for name in self.measures if name in MEASURES["multilabel"]]
        return {name: compute_mean_without_nan([row[name] for row in rows]) for name in named}

    def binary_labels(self, columns: Columns) -> BinaryLabels | None:
        customised = overrides(self, Multilabel, "columns") and overrides(self, Multilabel, "measure")
        return None if customised else make_binary_labels(columns)

    def loss_of_best_constant(self, columns: Columns) -> float | None:
        """Return the loss if each label's share of the known samples were predicted for all samples.

        If a subclass overrides the loss, the weights or the columns, returns None.
        """
        if overrides(self, Multilabel, "losses", "weights", "columns"):
            return None
        known = ~columns["truth"].isnan()
        counts, positive = known.sum(0), columns["truth"].nan_to_num(nan=0.0).sum(0)
        share = positive / counts.clamp(min=1)
        entropy = -torch.special.xlogy(share, share) - torch.special.xlogy(1 - share, 1 - share)
        if self.class_weights is not None:
            counts = counts * self.class_weights.to(entropy)
        return float((entropy * counts).sum() / (counts.sum() or 1))

    def name_labels(self, labels: int) -> tuple[str, ...]:
        return self.facts.classes or tuple(map(str, range(labels)))

    def answers(self, outputs: Any) -> TableColumns:
        """Return a table's columns: ``prediction`` (the predicted labels as a text) and ``probability_<label>``.

        ``outputs`` are logits.
        """
        probabilities = outputs.sigmoid().cpu()
        names = self.name_labels(probabilities.shape[1])
        columns, predicted = (
            make_unique_column_names("probability", names),
            join_label_names(probabilities >= THRESHOLD, names),
        )
        return {"prediction": predicted, **dict(zip(columns, probabilities.T.tolist(), strict=True))}

    def top_answers(self, outputs: Any, number: int) -> TableColumns:
        """Return columns of the ``number`` likeliest labels: ``top_<rank>`` and ``probability_top_<rank>``.

        The predicted labels are returned as a text in the column ``prediction``.
        """
        probabilities = outputs.sigmoid().cpu()
        names = self.name_labels(probabilities.shape[1])
        ranks = probabilities.nan_to_num(nan=0.0).topk(min(number, len(names))).indices
        predicted = join_label_names(probabilities >= THRESHOLD, names)
        return {"prediction": predicted, **make_top_columns("", "probability", names, probabilities, ranks)}

    def truths(self, targets: Tensor) -> TableColumns:
        columns = make_unique_column_names("truth", self.name_labels(targets.shape[1]))
        return {**self.top_truths(targets, 0), **dict(zip(columns, targets.T.tolist(), strict=True))}

    def top_truths(self, targets: Tensor, number: int) -> TableColumns:  # noqa: ARG002
        """Return each sample's labels as a text, in the column ``truth``. The ``number`` of ranks is ignored."""
        texts = join_label_names(targets.cpu() == 1, self.name_labels(targets.shape[1]))
        unknown = targets.isnan().all(1).tolist()
        return {"truth": ["unknown" if nothing else text for text, nothing in zip(texts, unknown, strict=True)]}

    def sections(self, columns: Columns) -> list[Section]:
        """Return sections of the report: the labels' measures, curves, and pictures with the largest losses."""
        rows: list[list[str | float | None]] = []
        labels = make_binary_labels(columns)
        measured = labels.measure()
        names = self.name_labels(len(measured))
        for name, (truth, _, _), found in zip(names, labels.iterate_known_labels(), measured, strict=True):
            rows.append([name, len(truth), int(truth.sum()), *found.values()])
        header = "Label", "Known", "Positive", "F1", "AUROC", "Average precision", "Balanced accuracy"
        text = f"A label is predicted if its probability is at least {THRESHOLD}."
        empty = [str(name) for name, _, positive, *_ in rows if not positive]
        if empty:
            text += f" Not in the means, because no sample has the label: {join_first(empty)}."
        full = [str(name) for name, known, positive, *_ in rows if positive and known == positive]
        if full:
            text += " Not in the means of AUROC and balanced accuracy, because all samples have the label: "
            text += f"{join_first(full)}."
        return [Table("Labels", text, header, rows), *labels.draw_curves(names), *super().sections(columns)]


def make_binary_labels(columns: Columns) -> BinaryLabels:
    truth, scores = columns["truth"].numpy(), columns["probability"].numpy()
    return BinaryLabels(truth, scores, scores >= THRESHOLD)


def join_label_names(there: Tensor, names: Sequence[str]) -> list[str]:
    """Return each sample's label names as a text, or "none".

    ``there`` [n, labels] is True where a sample has the label.
    """
    return [", ".join(compress(names, row)) or "none" for row in there.tolist()]
