"""The losses of a batch and their weights: what must fit, their sum, and their columns in an evaluation."""

from typing import Any

import torch
from torch import Tensor

from flyte_ddp.errors import UserError


def sum_losses(losses: Tensor, weights: Tensor | None, samples: int) -> Tensor:
    """Return the weighted sum of checked losses, []; a single number counts as the loss of each sample."""
    require_losses(losses, weights, samples)
    if losses.dim() == 0:
        return losses * (samples if weights is None else weights.sum())
    return (losses if weights is None else losses * weights).sum()


def loss_columns(losses: Tensor, weights: Tensor | None, samples: int) -> dict[str, Tensor]:
    """Return the column ``loss`` [samples], and with weights each sample's weighted sum, and that of its ``weight``."""
    require_weights(weights, samples)
    require_losses(losses, weights, samples)
    if weights is None:
        return {"loss": losses.expand(samples)}
    columns = {"loss": losses * weights, "weight": weights}
    return {name: values.reshape(samples, -1).sum(1, dtype=torch.float64) for name, values in columns.items()}


def require_losses(losses: Any, weights: Tensor | None, samples: int) -> None:
    if not isinstance(losses, Tensor):
        raise UserError(f"the objective's losses are a {type(losses).__name__}: must be a tensor of losses")
    shape = torch.Size([samples]) if weights is None else weights.shape
    if losses.dim() and losses.shape != shape:
        rule = f"{list(shape)}, " + ("one for each sample" if weights is None else "as the weights are")
        fix = "do not reduce them"
        if tuple(losses.shape) == (samples, samples):
            fix = "outputs [n, 1] and targets [n] make a table together: use outputs[:, 0]"
        raise UserError(f"the objective's losses have shape {list(losses.shape)}: must be {rule}; {fix}")


def require_weights(weights: Tensor | None, samples: int) -> None:
    if weights is None:
        return
    if weights.shape[:1] != (samples,):
        raise UserError(
            f"the objective's weights have shape {list(weights.shape)}: must be one or more for each of the {samples} "
            "samples; do not reduce them"
        )
    if not bool(((weights >= 0) & weights.isfinite()).all()):
        raise UserError(
            f"the objective's weights go from {weights.min().item():g} to {weights.max().item():g}: must be finite and "
            "at least 0; 0 leaves a loss out"
        )
