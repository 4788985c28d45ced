"""Losses and their weights: one tensor, or one for each of several terms, which have means of their own."""

import math

import torch
from torch import Tensor

from flyte_ddp.errors import UserError

Terms = Tensor | dict[str, Tensor]  # the terms' losses or weights by name, or a single tensor, whose name here is ""


def name_terms(values: Terms | None) -> dict[str, Tensor | None]:
    """Return the losses or weights of each term by its name; a single tensor, or None, is called ""."""
    return {**values} if isinstance(values, dict) else {"": values}


def pair_terms(losses: Terms, weights: Terms | None, samples: int) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Return losses and weights of each term by its name ("" for a single loss); UserError if they do not fit."""
    named, own = name_terms(losses), name_terms(weights)
    if named.keys() != own.keys() or (weights is None and isinstance(losses, dict)):
        raise UserError(
            f"the objective's losses have the terms {', '.join(named) or 'none'}, and its weights "
            f"{', '.join(own) or 'none'}: return dicts with the same names from both"
        )
    pairs = {name: (each, own[name]) for name, each in named.items() if each is not None}
    for each, weight in pairs.values():
        shape = torch.Size([samples]) if weight is None else weight.shape
        if each.dim() and each.shape != shape:
            rule = f"{list(shape)}, " + ("one for each sample" if weight is None else "as the weights are")
            fix = "do not reduce them"
            if tuple(each.shape) == (samples, samples):
                fix = "outputs [n, 1] and targets [n] make a table together: use outputs[:, 0]"
            raise UserError(f"the objective's losses have shape {list(each.shape)}: must be {rule}; {fix}")
    return pairs


def sum_term(losses: Tensor, weights: Tensor | None, samples: int) -> Tensor:
    """Return the weighted sum of a term's losses, []; a single number counts as the loss of each sample."""
    if losses.dim() == 0:
        return losses * (samples if weights is None else weights.sum())
    return (losses if weights is None else losses * weights).sum()


def loss_columns(losses: Terms, weights: Terms | None, samples: int) -> dict[str, Tensor]:
    """Return the column ``loss`` [samples], and with weights each sample's sums of weighted losses and of ``weight``.

    Of terms these are ``loss_NAME`` and ``weight_NAME`` of each, to be joined by :func:`add_loss_of_terms`.
    """
    require_weights(weights, samples)
    columns = dict[str, Tensor]()
    for name, (each, weight) in pair_terms(losses, weights, samples).items():
        if weight is None:
            return {"loss": each.expand(samples)}
        for column, values in (("loss", each * weight), ("weight", weight)):
            columns[f"{column}_{name}" if name else column] = values.reshape(samples, -1).sum(1, dtype=torch.float64)
    return columns


def add_loss_of_terms(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the columns [N] of all samples with ``loss``; where it is missing, it is made of the terms' columns.

    Its mean over the samples is then the sum of the terms' weighted means; a term without any weight has mean 0.
    """
    if "loss" in columns or not columns:
        return columns
    loss = torch.zeros((), dtype=torch.float64)
    for name, weight in columns.items():
        if name.startswith("weight_") and (of_term := columns.get(f"loss_{name.removeprefix('weight_')}")) is not None:
            loss = loss + of_term * len(weight) / (weight.sum().item() or math.inf)
    return {"loss": loss, **columns}


def require_weights(weights: Terms | None, samples: int) -> None:
    for each in name_terms(weights).values():
        if each is None:
            return
        if each.shape[:1] != (samples,):
            raise UserError(
                f"the objective's weights have shape {list(each.shape)}: must be one or more for each of the {samples} "
                "samples; do not reduce them"
            )
        if not bool(((each >= 0) & each.isfinite()).all()):
            raise UserError(
                f"the objective's weights go from {each.min().item():g} to {each.max().item():g}: must be finite and "
                "at least 0; 0 leaves a loss out"
            )
