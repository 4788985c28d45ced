"""Models for grey images of 8x8 pixels with unusual features that PyTorch allows."""

import random
from collections.abc import Callable

import numpy as np
import torch
from faults import OneLayer
from torch import Tensor, nn


class Thawing(nn.Module):
    """Trains the first layer later than the second layer."""

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 8).requires_grad_(False), nn.Linear(8, 10)
        self.passes = 0

    def forward(self, images: Tensor) -> Tensor:
        self.passes += 1
        self.first.requires_grad_(self.passes > 2)
        return self.second(self.first(images.flatten(1)))


class Drawn(OneLayer):
    """Weights are drawn from all generators in the constructor."""

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.register_buffer("order", torch.tensor(random.sample(range(64), 64)))
        self.register_buffer("scale", torch.from_numpy(np.random.random(64).astype("float32")))  # noqa: NPY002

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.flatten(1)[:, self.order] * self.scale)


class FrozenBody(OneLayer):
    """A frozen layer before a trained layer. A run is cut off in the middle of a pass."""

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.body = nn.Linear(64, 64).requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(self.body(images.flatten(1)))


class ExtraState(OneLayer):
    """Has an extra state in the state_dict. A run is cut off in the middle of a pass."""

    def __init__(self, extra: object) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        assert (type(state), state) == (type(self.extra), self.extra)


class ExtraNumpyLater(ExtraState):
    """The extra state becomes a NumPy scalar in the first forward pass."""

    def __init__(self, **_: object) -> None:
        super().__init__(1.5)

    def forward(self, images: Tensor) -> Tensor:
        self.extra = np.float64(1.5)
        return super().forward(images)


class OtherEachTime(OneLayer):
    """Uses the inputs in an order that is drawn in the constructor."""

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.order = torch.randperm(64)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.flatten(1)[:, self.order])


class Changed(OneLayer):
    """Returns changed logits, in training too or only in evaluations."""

    def __init__(self, change: Callable[[Tensor], object], *, in_training: bool = True) -> None:
        super().__init__()
        self.change, self.in_training = change, in_training

    def forward(self, images: Tensor) -> object:
        logits = super().forward(images)
        return self.change(logits) if self.in_training or not self.training else logits


def mask_least_likely(logits: Tensor) -> Tensor:
    return logits.masked_fill(logits == logits.amin(dim=1, keepdim=True), -torch.inf)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "extra_numpy": lambda: ExtraState({"version": 3, "temperatures": [np.float64(1.5)]}),
    "in_a_dict": lambda: Changed(lambda logits: {"logits": logits}),
    "three_classes_in_evaluation": lambda: Changed(lambda logits: logits[:, :3], in_training=False),
    "masked": lambda: Changed(mask_least_likely, in_training=False),
}


def _factory(make: Callable[[], nn.Module]) -> Callable[..., nn.Module]:
    return lambda **_: make()


for _name, _make in MODELS.items():
    globals()[_name] = _factory(_make)
