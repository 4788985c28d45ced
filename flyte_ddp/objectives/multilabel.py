"""Several labels for each sample, each there or not: binary cross-entropy, F1, AUROC, average precision."""

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
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
    Objective,
    list_names,
    mean_of_defined,
    overrides,
    require_outputs,
)
from flyte_ddp.objectives.table_columns import TableColumns, name_columns
from flyte_ddp.sections import Section, Table

THRESHOLD = 0.5  # probability from which a label counts as predicted


class Multilabel(Objective):
    """Targets are float [n, labels] of 0 and 1, or NaN where a label is unknown; outputs are logits [n, labels]."""

    measures: Mapping[str, str] = {"f1": HIGHER, "auroc": HIGHER, "average_precision": HIGHER}
    takes = frozenset(OBJECTIVES["multilabel"])
    loss_unit = "binary cross-entropy (nats)"

    def check_targets(self, targets: NDArray[Any]) -> None:
        """Raise UserError unless the targets are [N, labels] of 0, 1 and NaN, with as many labels as classes."""
        if targets.ndim != 2 or targets.dtype.kind != "f":
            raise UserError(
                f"objective='multilabel': the targets are {targets.dtype} {list(targets.shape)}; must be float "
                "[samples, labels] of 0 and 1, or NaN for unknown; convert them (astype('float32')), or choose another "
                "objective"
            )
        if len(self.facts.classes) not in (0, targets.shape[1]):
            raise UserError(
                f"the targets have {targets.shape[1]} labels, and there are {len(self.facts.classes)} names: give one "
                "name for each, or none"
            )
        wrong = np.argwhere(~(np.isnan(targets) | (targets == 0) | (targets == 1)))
        if len(wrong):
            sample, label = wrong[0].tolist()
            found = targets[sample, label]
            raise UserError(f"label {label} of row {sample} is {found:g}: must be 0, 1, or NaN for unknown")

    def check_outputs(self, model: str, outputs: Any, targets: Tensor) -> None:
        """Raise UserError unless the outputs are logits [n, labels]."""
        require_outputs(
            model, outputs, tuple(targets.shape), "(samples, classes)", "size its last layer by num_classes"
        )

    def weights(self, targets: Tensor) -> Tensor:
        """Return 1, or the label's class weight, for each known label, and 0 for each unknown one: [n, labels]."""
        known = (~targets.isnan()).to(torch.float32)
        return known if self.class_weights is None else known * self.class_weights_at(targets.device)

    def losses(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the binary cross-entropy of each label, [n, labels]."""
        # An unknown label is replaced: NaN times a weight of 0 would be NaN.
        known = targets.nan_to_num(nan=0.0).to(outputs.dtype)
        return functional.binary_cross_entropy_with_logits(outputs, known, reduction="none")

    def columns(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
        """Return the probability of each label, and its truth: ``probability`` and ``truth`` [n, labels]."""
        return {"probability": outputs.sigmoid(), "truth": targets}

    def measure(self, columns: Columns) -> dict[str, float]:
        """Return the means of scikit-learn's F1, ROC AUC and average precision over the labels (macro averages).

        Only known labels count. A label without a positive sample, and for the AUROC one without a negative sample, is
        left out of the mean; NaN if no label is left.
        """
        rows = self.measure_labels(columns)
        return {name: mean_of_defined([row[name] for row in rows]) for name in self.measures}

    def measure_labels(self, columns: Columns) -> list[dict[str, float]]:
        """Return the three measures of each label; NaN where a measure is not defined. Imports scikit-learn."""
        from sklearn import metrics  # which takes a second that other ranks need not wait

        functions: dict[str, Callable[..., float]] = {
            "f1": lambda truth, scores: metrics.f1_score(truth, scores >= THRESHOLD),
            "auroc": metrics.roc_auc_score,
            "average_precision": metrics.average_precision_score,
        }
        rows = []
        for truth, scores in zip(columns["truth"].T.numpy(), columns["probability"].T.numpy(), strict=True):
            known = ~np.isnan(truth)
            positive = truth[known] == 1
            defined = {name: positive.any() and (name != "auroc" or not positive.all()) for name in functions}
            rows.append(
                {
                    name: float(function(positive, scores[known])) if defined[name] else float("nan")
                    for name, function in functions.items()
                }
            )
        return rows

    def constant_loss(self, columns: Columns) -> float | None:
        """Return the weighted mean of the entropies of the labels' shares.

        None with class weights, and for a subclass with losses, weights or columns of its own.
        """
        if overrides(self, Multilabel, "losses", "weights", "columns") or self.class_weights is not None:
            return None
        known = ~columns["truth"].isnan()
        counts, positive = known.sum(0), columns["truth"].nan_to_num(nan=0.0).sum(0)
        share = positive / counts.clamp(min=1)
        entropy = -torch.special.xlogy(share, share) - torch.special.xlogy(1 - share, 1 - share)
        return float((entropy * counts).sum() / counts.sum().clamp(min=1))

    def name_labels(self, labels: int) -> tuple[str, ...]:
        """Return the names of the labels; their numbers as texts if they have no names."""
        return self.facts.classes or tuple(map(str, range(labels)))

    def answers(self, outputs: Any) -> TableColumns:
        """Return the labels of a probability from 0.5 on as ``prediction``, and each ``probability_<label>``."""
        probabilities = outputs.sigmoid().cpu()
        names = self.name_labels(probabilities.shape[1])
        columns = name_columns("probability", names)
        return {
            "prediction": list_labels(probabilities >= THRESHOLD, names),
            **dict(zip(columns, probabilities.T.tolist(), strict=True)),
        }

    def truths(self, targets: Tensor) -> TableColumns:
        """Return the labels that are there as ``truth``, and ``truth_<label>``: 0, 1, or NaN for unknown.

        The text is "unknown" if all labels are.
        """
        names = self.name_labels(targets.shape[1])
        columns, texts = name_columns("truth", names), list_labels(targets.cpu() == 1, names)
        return {
            "truth": [
                "unknown" if unknown else text
                for text, unknown in zip(texts, targets.isnan().all(1).tolist(), strict=True)
            ],
            **dict(zip(columns, targets.T.tolist(), strict=True)),
        }

    def sections(self, columns: Columns) -> list[Section]:
        """Return a table with a row for each label, and pictures of the largest losses."""
        from sklearn import metrics

        rows: list[list[str | float | None]] = []
        measured = self.measure_labels(columns)
        names = self.name_labels(len(measured))
        truths, scores = columns["truth"].T.numpy(), columns["probability"].T.numpy()
        for name, truth, score, measures in zip(names, truths, scores, measured, strict=True):
            known = ~np.isnan(truth)
            positive = int((truth == 1).sum())
            best: list[float | None] = [None, None]
            if positive:
                precision, recall, thresholds = metrics.precision_recall_curve(truth[known], score[known])
                f1 = (2 * precision * recall / np.maximum(precision + recall, 1e-300))[:-1]
                best = [float(f1.max()), float(thresholds[f1.argmax()])]
            rows.append([name, int(known.sum()), positive, *(measures[each] for each in self.measures), *best])
        header = ("Label", "Known", "Positive", "F1", "AUROC", "Average precision", "Best F1", "At threshold")
        text = f"A label counts as predicted from a probability of {THRESHOLD} on; the best F1 is at another threshold."
        empty = [str(name) for name, _, positive, *_ in rows if not positive]
        if empty:
            text += f" Not in the means, because no sample has the label: {list_names(empty)}."
        full = [str(name) for name, known, positive, *_ in rows if positive and known == positive]
        if full:
            text += f" Not in the mean AUROC, because all samples have the label: {list_names(full)}."
        return [Table("Labels", text, header, rows), *super().sections(columns)]


def list_labels(there: Tensor, names: Sequence[str]) -> list[str]:
    """Return for each sample the names of its labels, separated by commas, "none" without any; ``there`` is [n, K]."""
    return [", ".join(compress(names, row)) or "none" for row in there.tolist()]
