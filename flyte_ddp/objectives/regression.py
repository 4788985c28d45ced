"""One or several numbers for each sample: squared, absolute or Huber's loss; RMSE, MAE, R2."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from flyte_ddp.errors import UserError, unknown_name_error
from flyte_ddp.objectives.objective import HIGHER, LOWER, Columns, Facts, Objective, require_outputs

LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "huber": functional.huber_loss,
}


class Regression(Objective):
    """Targets are float [n] or [n, d], or NaN where a number is unknown; outputs [n, d], for targets [n] also [n, 1].

    The option ``loss`` is mse, l1 or huber (with delta 1).
    """

    measures: Mapping[str, str] = {"rmse": LOWER, "mae": LOWER, "r2": HIGHER}

    def __init__(self, facts: Facts, loss: str = "mse") -> None:
        super().__init__(facts)
        if loss not in LOSSES:
            raise unknown_name_error("loss", loss, [*LOSSES])
        self.loss = loss

    @property
    def outputs(self) -> int:
        """The numbers in a target."""
        return int(np.prod(self.facts.target_shape))

    def check_targets(self, targets: NDArray[Any]) -> None:
        """Raise UserError unless the targets are float [N] or [N, d], finite or NaN."""
        if targets.ndim not in (1, 2) or targets.dtype.kind != "f":
            raise UserError(
                f"objective='regression': the targets are {targets.dtype} {list(targets.shape)}; must be float "
                "[samples] or [samples, numbers]"
            )
        if np.isinf(targets).any():
            raise UserError("objective='regression': a target is infinite; must be a number, or NaN for unknown")

    def check_outputs(self, model: str, outputs: Any, targets: Tensor) -> None:
        """Raise UserError unless the outputs are [n, d], or [n] for targets [n]."""
        expected = tuple(targets.shape)
        if targets.dim() == 1 and isinstance(outputs, Tensor) and outputs.dim() == 2:
            expected = (len(targets), 1)
        require_outputs(model, outputs, expected, "(samples, numbers)", "size its last layer by num_classes")

    def weights(self, targets: Tensor) -> Tensor:
        """Return 1 for each known number, and 0 for each unknown one: of the targets' shape."""
        return (~targets.isnan()).to(torch.float32)

    def losses(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the loss of each number, of the targets' shape."""
        # An unknown number is replaced: NaN times a weight of 0 would be NaN.
        known = targets.nan_to_num(nan=0.0).to(outputs.dtype)
        return LOSSES[self.loss](outputs.reshape(targets.shape), known, reduction="none")

    def columns(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
        """Return the outputs as ``prediction``, and the targets as ``truth``, both of the targets' shape."""
        return {"prediction": outputs.reshape(targets.shape), "truth": targets}

    def measure(self, columns: Columns) -> dict[str, float]:
        """Return scikit-learn's root mean squared error, mean absolute error and R2: means over a target's numbers.

        Only known numbers count. NaN if none is known, and for R2 if fewer than two are.
        """
        from sklearn import metrics  # which takes a second that other ranks need not wait

        functions = {
            "rmse": metrics.root_mean_squared_error,
            "mae": metrics.mean_absolute_error,
            "r2": metrics.r2_score,
        }
        found: dict[str, list[float]] = {name: [] for name in functions}
        samples = len(columns["truth"])
        truths, predictions = (columns[name].reshape(samples, -1).T.numpy() for name in ("truth", "prediction"))
        for truth, prediction in zip(truths, predictions, strict=True):
            known = ~np.isnan(truth)
            for name, function in functions.items():
                if known.sum() >= (2 if name == "r2" else 1):
                    found[name].append(float(function(truth[known], prediction[known])))
        return {name: float(np.mean(values)) if values else float("nan") for name, values in found.items()}

    def constant_loss(self, columns: Columns) -> float | None:
        """Return the loss of the best constant: the mean for mse, the median for l1; None for huber."""
        if self.loss == "huber":
            return None
        truth = columns["truth"] if columns["truth"].dim() > 1 else columns["truth"][:, None]
        centre = truth.nanmean(0) if self.loss == "mse" else truth.nanmedian(0).values
        apart = (truth - centre).abs()
        return float((apart**2 if self.loss == "mse" else apart).nanmean())
