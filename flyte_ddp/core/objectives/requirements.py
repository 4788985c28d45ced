"""Check losses and their weights."""

from typing import Any

import torch
from torch import Tensor

from flyte_ddp.core.errors import UserError


def check_loss_shape(losses: Any, weights: Tensor | None, samples: int) -> None:
    """Raise UserError unless losses are a single number, or have the shape of the weights.

    If ``weights`` is None, the shape must be [samples].
    """
    if not isinstance(losses, Tensor):
        raise UserError(f"the objective's losses are a {type(losses).__name__}: must be a tensor of losses")
    shape = torch.Size([samples]) if weights is None else weights.shape
    if losses.dim() and losses.shape != shape:
        rule = f"{list(shape)}, " + ("one for each sample" if weights is None else "like the weights")
        fix = "do not reduce them"
        if tuple(losses.shape) == (samples, samples):
            fix = "outputs [n, 1] and targets [n] broadcast to a table: use outputs[:, 0]"
        raise UserError(f"the objective's losses have shape {list(losses.shape)}: must be {rule}; {fix}")


def check_loss_weights(weights: Tensor | None, samples: int) -> None:
    """Raise UserError if a weight is negative or not finite, or if a sample has no row. None is accepted."""
    if weights is None:
        return
    if weights.shape[:1] != (samples,):
        raise UserError(
            f"the objective's weights have shape {list(weights.shape)}: must have one or more weights for each of the "
            f"{samples} samples; do not reduce the weights"
        )
    if not bool(((weights >= 0) & weights.isfinite()).all()):
        raise UserError(
            f"the objective's weights range from {weights.min().item():g} to {weights.max().item():g}: must be finite "
            "and at least 0; 0 excludes a loss"
        )
