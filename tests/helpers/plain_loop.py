"""Training as one would write it by hand: one process, no DDP, nothing of the library."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import functional

from flyte_ddp.config import Hyperparameters


def train_plainly(
    hp: Hyperparameters, model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, batches: Iterable
) -> list[float]:
    """SGD over the batches of positions of all epochs, with the linear schedule that rises in the first quarter."""
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1.0, momentum=hp.momentum, weight_decay=hp.weight_decay, nesterov=hp.nesterov
    )
    batches = list(batches)
    rise = len(batches) // 4
    losses = []
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            below = (step + 1) / (rise + 1)
            group["lr"] = hp.learning_rate * (below if step < rise else 1 - (step - rise) / (len(batches) - rise))
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
