"""Models for grey images of 8x8 pixels whose passes change what they hold, or draw random numbers."""

from __future__ import annotations

import copy
import random
from collections import deque

import faults
import numpy as np
import torch
from torch import Tensor, nn


class Centred(nn.Module):
    """Follows the mean of its inputs in buffers of many kinds, and takes it away from them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(64))
        self.register_buffer("replaced", torch.zeros(64))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hidden", torch.zeros(64), persistent=False)
        self.register_buffer("constant", torch.ones(64))
        self.frozen = nn.Parameter(torch.zeros(64), requires_grad=False)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        faults.passing("training" if self.training else "evaluation")
        if self.training:
            mean = x.detach().mean(0)
            self.centre.data.mul_(0.9).add_(mean, alpha=0.1)  # of which autograd's counter of versions knows nothing
            self.replaced = 0.9 * self.replaced + 0.1 * mean
            self.passes += 1
            self.hidden.lerp_(mean, 0.1)
            self.frozen.data.lerp_(mean, 0.1)
            if not hasattr(self, "late"):
                self.register_buffer("late", mean)
        x = x - self.centre - self.replaced - self.hidden - self.frozen
        return self.head(x * self.constant)


def centred(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Centred()


class Noisy(nn.Module):
    """Draws from every generator there is, and leaves out layers at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        faults.passing("training" if self.training else "evaluation")
        for layer in self.layers:
            if self.training and (random.random() < 0.3 or np.random.random() < 0.1):  # noqa: NPY002
                continue
            x = nn.functional.dropout(layer(x).relu() + x, 0.2, self.training)
        return self.head(x + 0.1 * torch.randn_like(x) if self.training else x)


def noisy(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Noisy()


class Growing(nn.Module):
    """Has a bank of samples that grows, a buffer that is there from the second epoch on, and a count of passes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.register_buffer("bank", torch.zeros(0, 64))
        self.passes = 0

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        if self.training:
            self.passes += 1
            self.bank = torch.cat([self.bank, x[:1].detach()])
            if self.passes > 15 and not hasattr(self, "late"):
                self.register_buffer("late", x[0].detach())
        logits = self.head(x - self.bank.mean(0))
        return logits if self.training or not hasattr(self, "late") else -logits


def growing(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Growing()


class FromThirdStep(nn.Module):
    """Changes a buffer that two modules share, from the third step on, by what is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 16), nn.Linear(16, 10)
        self.passes, shared = 0, torch.zeros(16)
        self.body.register_buffer("centre", shared)
        self.head.register_buffer("centre", shared)

    def forward(self, images: Tensor) -> Tensor:
        x = self.body(images.flatten(1))
        if self.training:
            self.passes += 1
            if self.passes > 6:
                self.body.centre.lerp_(x.detach().mean(0), 0.1)
        return self.head(x - self.head.centre)


def from_third_step(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return FromThirdStep()


class Uncertain(nn.Module):
    """Drops in evaluations too, as for the uncertainty of its outputs, by a layer and by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(64, 10)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.train()
        return self

    def forward(self, images: Tensor) -> Tensor:
        x = self.head(self.dropout(images.flatten(1)))
        return x if self.training else nn.functional.dropout(x, 0.1, training=True)


def uncertain(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Uncertain()


class Twice(nn.Module):
    """One block in two places, whose buffers have two names in the state_dict, and a cut in the middle of a pass."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())
        self.first, self.second, self.head = block, block, nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images.flatten(1))
        faults.passing("training" if self.training else "evaluation")
        return self.head(self.second(x))


def twice(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Twice()


class Mean:
    def __init__(self) -> None:
        self.value = torch.zeros(64)

    def __call__(self, x: Tensor) -> Tensor:
        self.value = 0.9 * self.value + 0.1 * x.detach().mean(0)
        return self.value


class Hidden(nn.Module):
    """Changes what no file holds, in ways that are hard to see, and keeps other things as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.scale, self.dropout = nn.Linear(64, 10), nn.Parameter(torch.ones(())), nn.Dropout(0.1)
        self.object, self.numbers = Mean(), random.Random(1)
        self.generator, self.queue = torch.Generator().manual_seed(1), deque[Tensor](maxlen=3)
        self.features: dict[str, Tensor] = {}
        self.others = [self.head, self.scale, self.dropout]
        self.function = lambda x: x

    def forward(self, images: Tensor) -> Tensor:
        x = self.function(images.flatten(1))
        if self.training:
            x = x - self.object(x) + self.numbers.random()
            x = x + torch.randn(64, generator=self.generator)
            self.queue.append(x.detach().mean(0))
            x = x - sum(self.queue)
        self.features["x"] = self.head(x) * self.dropout(self.scale)
        return self.features["x"]


def hidden(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Hidden()


class SetByData(nn.Module):
    """Sets a trained weight by the first batch, as Glow's ActNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.shift = nn.Linear(64, 10), nn.Parameter(torch.zeros(64))
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        if self.training and not self.is_set:
            self.shift.data.copy_(-x.mean(0))
            self.is_set.fill_(True)
        return self.head(x + self.shift)


def set_by_data(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return SetByData()


class Stages(nn.Module):
    """Counts how often it is put into training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.stage = nn.Linear(64, 10), 0

    def train(self, mode: bool = True) -> nn.Module:
        self.stage += mode
        return super().train(mode)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.flatten(1))


def stages(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Stages()


class GivesUp(nn.Module):
    """Sets a buffer to None in the second epoch, and is cut off in the middle of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.register_buffer("warm", torch.ones(64))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((64,), 0.5))

    def forward(self, images: Tensor) -> Tensor:
        faults.passing("training" if self.training else "evaluation")
        if self.training:
            self.passes += 1
            if self.passes > 4:
                self.warm = None
        return self.head(images.flatten(1) * (self.scale if self.warm is None else self.warm))


def gives_up(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return GivesUp()


class InList(nn.Module):
    """Follows its weights with a module that is kept where torch does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.teacher, self.constant = [copy.deepcopy(self.head)], [copy.deepcopy(self.head)]

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        with torch.no_grad():
            if self.training:
                for its, own in zip(self.teacher[0].parameters(), self.head.parameters(), strict=True):
                    its.lerp_(own, 0.3)
            taught = self.teacher[0](x) + self.constant[0](x)
        return self.head(x) + taught


def in_list(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return InList()


class ByFirstBatch(nn.Module):
    """Keeps for training, in no buffer, the mean of the first batch it sees, and what is the same for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.mean: Tensor | None = None
        self.ones: Tensor | None = None

    def forward(self, images: Tensor) -> Tensor:
        faults.passing("training" if self.training else "evaluation")
        x = images.flatten(1)
        if self.mean is None:
            self.mean, self.ones = x.detach().mean(0), torch.ones(64)
        return self.head((x - self.mean if self.training else x) * self.ones)


def by_first_batch(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return ByFirstBatch()


class Unscaled(nn.Module):
    """Divides by a number that each training pass changes, and that no file holds."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.scale = nn.Linear(64, 10), 1.0

    def forward(self, images: Tensor) -> Tensor:
        self.scale += 0.1 * self.training
        return self.head(images.flatten(1)) / self.scale


def unscaled(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Unscaled()


class TwoNames(nn.Module):
    """Changes a frozen parameter that two modules share, and is cut off in the middle of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.first, self.second = nn.Linear(64, 10), nn.Module(), nn.Module()
        self.first.centre = self.second.centre = nn.Parameter(torch.zeros(64), requires_grad=False)

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        if self.training:
            self.first.centre.data.lerp_(x.detach().mean(0), 0.2)
        faults.passing("training" if self.training else "evaluation")
        return self.head(x - self.second.centre)


def two_names(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return TwoNames()
