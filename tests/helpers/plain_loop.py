"""A training loop written by hand: one process, torch's optimiser, and no part of the library."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import open_arrays


def plain_steps(
    hp: Hyperparameters,
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    batches: Iterable,
    rate: Callable[[int], float],
) -> Iterator[float]:
    """Train by SGD over batches of positions, with the learning rate ``rate(step)``. Yield the loss of each step."""
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1.0, momentum=hp.momentum, weight_decay=hp.weight_decay, nesterov=hp.nesterov
    )
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.zero_grad()
        losses = []
        for part in np.array_split(batch, hp.accumulation_steps):
            if len(part):
                loss = functional.cross_entropy(model(images[part]), labels[part], reduction="sum") / len(batch)
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
        yield sum(losses)


def train_plainly(
    hp: Hyperparameters, model: nn.Module, images: Tensor, labels: Tensor, batches: Iterable
) -> list[float]:
    """Train over all batches, without accumulation, with the one_cycle schedule. Return the losses."""
    batches = list(batches)
    rise = len(batches) // 4

    def rate(step: int) -> float:
        below = (step + 1) / (rise + 1)
        return hp.learning_rate * (below if step < rise else 1 - (step - rise) / (len(batches) - rise))

    whole = Hyperparameters.from_dict({**hp.to_dict(), "accumulation_steps": 1})
    return [*plain_steps(whole, model, images, labels, batches, rate)]


def arrays_in_fp64(data: Path, split: str) -> tuple[Tensor, Tensor]:
    """Return the normalised images and the labels of a split, ``train`` or ``test``, of a grey data set."""
    arrays = open_arrays(data)
    images = torch.tensor(np.array(getattr(arrays, f"{split}_inputs"))).permute(0, 3, 1, 2).double()
    labels = torch.tensor(np.array(getattr(arrays, f"{split}_targets")))
    return (images / 255 - arrays.mean[0]) / arrays.std[0], labels
