"""Objective with one or several numbers for each sample: squared, absolute or Huber loss, RMSE, MAE and R2."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from flyte_ddp.core.errors import unknown_name_error
from flyte_ddp.core.objectives.objective import (
    HIGHER,
    LOWER,
    Columns,
    Facts,
    Objective,
    compute_mean_without_nan,
    overrides,
)
from flyte_ddp.core.objectives.table_columns import TableColumns, make_number_columns
from flyte_ddp.core.text.formatting import join_first
from flyte_ddp.core.text.sections import Histogram, Scatter, Section, Table
from flyte_ddp.objectives.requirements import check_output_shape, check_target_type, check_target_values

LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "huber": functional.huber_loss,
}
UNITS = {"mse": "squared error", "l1": "absolute error", "huber": "Huber loss"}
DRAWN_NUMBERS = 4  # of a target
MOST_POINTS = 2000  # of a scatter chart
MOST_BINS = 40  # of a histogram


class Regression(Objective):
    """Objective for float targets [n] or [n, d], with outputs of the same shape.

    The target of an unknown number is NaN. For targets [n], outputs may also be [n, 1]. The option ``loss`` is mse, l1
    or huber (with delta 1).
    """

    measures: Mapping[str, str] = {"rmse": LOWER, "mae": LOWER, "r2": HIGHER}

    def __init__(self, facts: Facts, loss: str = "mse") -> None:
        """Keep ``facts``, and choose the ``loss``: "mse", "l1" or "huber". Raises UserError for another name."""
        super().__init__(facts)
        if loss not in LOSSES:
            raise unknown_name_error("loss", loss, [*LOSSES])
        customised = overrides(self, Regression, "losses")
        self.loss, self.loss_unit = loss, Objective.loss_unit if customised else UNITS[loss]

    @property
    def outputs(self) -> int:
        return int(np.prod(self.facts.target_shape))

    def check_targets(self, targets: NDArray[Any]) -> None:
        """Raise UserError unless ``targets`` are floats [samples] or [samples, numbers], finite or NaN (unknown)."""
        rule = "float [samples] or [samples, numbers] (astype('float32'))"
        check_target_type("regression", targets, (1, 2), "f", rule)
        check_target_values("regression", targets, lambda part: ~np.isinf(part), "a number, or NaN for unknown")

    def check_outputs(self, model: str, outputs: Any, targets: Tensor) -> None:
        """Raise UserError unless the outputs have the shape of the targets. ``model`` is named in the error.

        For targets [n], outputs [n, 1] are also accepted.
        """
        expected = tuple(targets.shape)
        if targets.dim() == 1 and isinstance(outputs, Tensor) and outputs.dim() == 2:
            expected = (len(targets), 1)
        check_output_shape(model, outputs, expected, "(samples, numbers)", "size its last layer by num_classes")

    @cached_property
    def has_weights(self) -> bool:
        """Whether a target may be unknown, or a subclass overrides weights or losses."""
        return not self.facts.no_nan_targets or overrides(self, Regression, "weights", "losses")

    def weights(self, targets: Tensor) -> Tensor | None:
        return (~targets.isnan()).to(torch.float32) if self.has_weights else None

    def losses(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the loss of each number, in the shape of the targets.

        If no target can be unknown, returns each sample's mean loss, [n].
        """
        # Unknown numbers are replaced, because NaN times a weight of 0 is NaN.
        known = targets.nan_to_num(nan=0.0) if self.has_weights else targets
        losses = LOSSES[self.loss](outputs.reshape(targets.shape), known.to(outputs.dtype), reduction="none")
        # Without weights return the mean, because ranks then need not add up weights in each step.
        return losses if self.has_weights or losses.dim() == 1 else losses.mean(1)

    def loss_sum(self, outputs: Any, targets: Tensor, weights: Tensor | None, samples: int) -> Tensor:
        """Return the weighted sum of a batch's losses, as a scalar. Without weights, sums each sample's mean loss."""
        if weights is not None or self.has_weights:
            return super().loss_sum(outputs, targets, weights, samples)
        total = LOSSES[self.loss](outputs.reshape(targets.shape), targets.to(outputs.dtype), reduction="sum")
        return total if targets.dim() == 1 else total / targets.shape[1]

    def columns(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
        return {"prediction": outputs.reshape(targets.shape), "truth": targets}

    def measure(self, columns: Columns) -> dict[str, float]:
        """Return root mean squared error, mean absolute error and R2, computed as by scikit-learn.

        Each measure is computed for each number of a target, over the samples where the number is known, and averaged
        over the numbers. Numbers for which the measure is undefined are skipped. If all numbers are skipped, the
        measure is NaN.
        """
        found = self.measure_each_number(columns)
        return {name: compute_mean_without_nan([row[name] for row in found]) for name in self.measures}

    def measure_each_number(self, columns: Columns) -> list[dict[str, float]]:
        """Return ``rmse``, ``mae`` and ``r2`` of each number of a target, over the samples where the number is known.

        Without known samples, the measures are NaN. R2 is also NaN for a single sample. Imports scikit-learn.
        """
        from sklearn import metrics  # late, because the import takes a second, and most ranks measure nothing

        functions = {
            "rmse": metrics.root_mean_squared_error,
            "mae": metrics.mean_absolute_error,
            "r2": metrics.r2_score,
        }
        return [
            {
                name: float(function(truth, prediction)) if len(truth) >= (2 if name == "r2" else 1) else float("nan")
                for name, function in functions.items()
            }
            for truth, prediction in list_known_pairs(columns)
        ]

    def loss_of_best_constant(self, columns: Columns) -> float | None:
        """Return the loss of the best constant prediction: the mean for mse, the median for l1.

        For huber, or if a subclass overrides losses, weights or columns, returns None.
        """
        if overrides(self, Regression, "losses", "weights", "columns") or self.loss == "huber":
            return None
        truth = columns["truth"] if columns["truth"].dim() > 1 else columns["truth"][:, None]
        centre = truth.nanmean(0) if self.loss == "mse" else truth.nanmedian(0).values
        apart = (truth - centre).abs()
        return float((apart**2 if self.loss == "mse" else apart).nanmean())

    def answers(self, outputs: Any) -> TableColumns:
        return make_number_columns("prediction", outputs.reshape(len(outputs), *self.facts.target_shape))

    def sections(self, columns: Columns) -> list[Section]:
        """Return sections of the report: charts of the first 4 numbers, a table of errors, and the largest losses.

        The charts are a scatter chart and a histogram of residuals for each number.
        """
        rows: list[list[str | float | None]] = []
        charts: list[Section] = []
        measured = self.measure_each_number(columns)
        names = [f"number {place}" for place in range(len(measured))]
        if len(self.facts.classes) == len(names):
            names = [*self.facts.classes]
        title, text = "Predictions", "The test samples. The residual is the prediction minus the truth."
        if len(names) > DRAWN_NUMBERS:
            text += f" The first {DRAWN_NUMBERS} of {len(names)} numbers are drawn."
        if len(columns["truth"]) > MOST_POINTS:
            text += f" At most {MOST_POINTS:,} samples are drawn as points."
        for name, (truth, prediction), measures in zip(names, list_known_pairs(columns), measured, strict=True):
            residuals = prediction - truth
            rows.append([name, len(truth), *measures.values(), float(residuals.mean()) if len(truth) else None])
            if len(truth) and len(rows) <= DRAWN_NUMBERS:
                drawn = np.unique(np.linspace(0, len(truth) - 1, min(len(truth), MOST_POINTS)).astype(np.int64))
                shown = "" if len(names) == 1 else name
                points = prediction[drawn].tolist(), truth[drawn].tolist()
                charts.append(Scatter(title, text, shown, "prediction", "truth", *points))
                counts, edges = np.histogram(residuals, bins=min(MOST_BINS, 5 + int(len(truth) ** 0.5)))
                charts.append(Histogram(title, text, shown, "residual", edges.tolist(), counts.tolist()))
        header = ("Number", "Known", "RMSE", "MAE", "R2", "Mean residual")
        text = "Computed from the known numbers of the test samples."
        if unknown := [str(row[0]) for row in rows if not row[1]]:
            text += f" Not in the means, because the number is unknown in all samples: {join_first(unknown)}."
        return [*charts, Table("Errors", text, header, rows), *super().sections(columns)]


def list_known_pairs(columns: Columns) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return the pair (truths, predictions) for each number of a target, without samples whose truth is unknown."""
    samples = len(columns["truth"])
    truths, predictions = (columns[name].reshape(samples, -1).T.numpy() for name in ("truth", "prediction"))
    pairs = zip(truths, predictions, strict=True)
    return [(truth[~np.isnan(truth)], prediction[~np.isnan(truth)]) for truth, prediction in pairs]
