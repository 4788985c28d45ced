"""Models for grey images of 8x8 pixels whose passes change state, or draw random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import faults
import numpy as np
import torch
from faults import OneLayer
from torch import Tensor, nn


class Centred(OneLayer):
    """Subtracts a running mean of the inputs, kept in buffers of many kinds. Evaluations change one buffer."""

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(64))
        self.register_buffer("replaced", torch.zeros(64))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hidden", torch.zeros(64), persistent=False)
        self.register_buffer("constant", torch.ones(64))

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        if self.training:
            mean = x.detach().mean(0)
            self.centre.data.mul_(0.9).add_(mean, alpha=0.1)  # not counted by autograd's version counter
            self.replaced = 0.9 * self.replaced + 0.1 * mean
            self.hidden.lerp_(mean, 0.1)
        self.passes += 1
        return super().forward((x - self.centre - self.replaced - self.hidden) * self.constant)


class Resized(OneLayer):
    """Changes buffers in the second pass, by the function ``how``."""

    def __init__(self, how: Callable[[Resized, Tensor], None], **_: object) -> None:
        super().__init__()
        self.how, self.passes = how, 0
        self.register_buffer("bank", torch.zeros(1, 64))
        self.register_buffer("none", None)

    def forward(self, images: Tensor) -> Tensor:
        self.passes += 1
        if self.passes == 2:
            self.how(self, images.detach().flatten(1))
        return super().forward(images)


def grow(model: Resized, x: Tensor) -> None:
    model.bank = torch.cat([model.bank, x[:1]])


grows = partial(Resized, grow)
registers = partial(Resized, lambda model, x: model.register_buffer("late", x[0]))


class Noisy(OneLayer):
    """Draws from all generators, and skips layers at random."""

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, images: Tensor) -> Tensor:
        faults.passing("training" if self.training else "evaluation")
        x = images.flatten(1)
        for layer in self.layers:
            if self.training and (random.random() < 0.3 or np.random.random() < 0.1):  # noqa: NPY002
                continue
            x = nn.functional.dropout(layer(x).relu() + x, 0.2, self.training)
        return self.head(x + 0.1 * torch.randn_like(x) if self.training else x)


class Uncertain(OneLayer):
    """Applies dropout in evaluations, too (as for uncertainties), by a layer and by a function."""

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.dropout.train()
        return self

    def forward(self, images: Tensor) -> Tensor:
        x = super().forward(self.dropout(images.flatten(1)))
        return x if self.training else nn.functional.dropout(x, 0.1, training=True)


class Unscaled(OneLayer):
    """Divides by a number that each training pass changes and no file stores."""

    scale = 1.0

    def forward(self, images: Tensor) -> Tensor:
        self.scale += 0.1 * self.training
        return super().forward(images) / self.scale
