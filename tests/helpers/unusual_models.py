"""Models for grey images of 8x8 pixels that hold, do or return what plain PyTorch allows and few models have."""

import random
import time
from collections.abc import Callable

import numpy as np
import torch
from faults import OneLayer
from torch import Tensor, nn


class Unusual(nn.Module):
    """What plain PyTorch allows to keep in a model; fails where it is not what it was made."""

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.conv, self.norm, self.dropout = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.1)
        self.head = nn.Linear(144, 10)
        self.register_buffer("turn", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("conjugate", torch.tensor([1 + 2j]).conj())
        self.register_buffer("half_ones", torch.ones(4, dtype=torch.half))
        self.register_buffer("expanded", torch.ones(1).expand(144), persistent=False)
        self.register_buffer("sparse", torch.eye(4).to_sparse())
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("none", None)
        self.remembered: dict[int, Tensor] = {}
        self.dropout.register_forward_hook(lambda *call: call[-1] * 2)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 3}

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        assert not self.norm.training
        assert self.dropout.p == 0.1
        assert self.turn.imag.abs().sum() > 1
        assert self.conjugate.imag == -2
        assert self.half_ones.dtype == torch.half
        with torch.enable_grad():  # such as a model of energies does, also in evaluation
            energy = images.detach().requires_grad_()
            (force,) = torch.autograd.grad(energy.square().sum(), energy)
        x = self.norm(self.conv(images + 0.1 * force)).flatten(1)
        if not self.remembered:
            self.remembered[0] = self.head.weight.new_ones(10)
        return self.head(self.dropout(x * self.expanded)) * self.remembered[0]


class Thawing(nn.Module):
    """Trains its first layer later than its second."""

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 8).requires_grad_(False), nn.Linear(8, 10)
        self.passes = 0

    def forward(self, images: Tensor) -> Tensor:
        self.passes += 1
        self.first.requires_grad_(self.passes > 2)
        return self.second(self.first(images.flatten(1)))


class Drawn(OneLayer):
    """Drawn from each generator there is when it is made."""

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.register_buffer("order", torch.tensor(random.sample(range(64), 64)))
        self.register_buffer("scale", torch.from_numpy(np.random.random(64).astype("float32")))  # noqa: NPY002

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.flatten(1)[:, self.order] * self.scale)


class FrozenBody(OneLayer):
    """A frozen layer before the one that is trained, and a cut in the middle of a pass."""

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.body = nn.Linear(64, 64).requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(self.body(images.flatten(1)))


class Versioned(FrozenBody):
    """Turns the weights of files that are older than it is, as torchvision's MNASNet does."""

    _version = 2

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, local_metadata: dict[str, int], *rest: list[str]
    ) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}head.weight"] = -state_dict[f"{prefix}head.weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)  # type: ignore[arg-type]


class ExtraState(OneLayer):
    """Has an extra state of its own in its state_dict, and is cut off in the middle of a pass."""

    def __init__(self, extra: object) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        assert (type(state), state) == (type(self.extra), self.extra)


class ExtraNumpyLater(ExtraState):
    """Its extra state becomes a NumPy scalar in the first forward pass."""

    def __init__(self, **_: object) -> None:
        super().__init__(1.5)

    def forward(self, images: Tensor) -> Tensor:
        self.extra = np.float64(1.5)
        return super().forward(images)


class OtherEachTime(OneLayer):
    """Takes its inputs in an order that is drawn when it is made."""

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.order = torch.randperm(64)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.flatten(1)[:, self.order])


class SlowToLoad(OneLayer):
    """Takes 2 seconds to take over a state_dict."""

    def load_state_dict(self, state_dict: dict[str, Tensor], strict: bool = True, assign: bool = False) -> object:
        time.sleep(2.0)
        return super().load_state_dict(state_dict, strict, assign)


class Changed(OneLayer):
    """Makes something else of its logits before it returns them, in training too or only in evaluations."""

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
