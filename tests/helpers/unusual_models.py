"""Models for grey images of 8x8 pixels that hold, do or return what plain PyTorch allows and few models have."""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Callable

import faults
import numpy as np
import torch
from torch import Tensor, nn


class Unusual(nn.Module):
    """What plain PyTorch allows to keep in a model; fails where it is not what it was made."""

    def __init__(self) -> None:
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
        self.register_buffer("scale", None, persistent=False)
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
        assert self.half_ones.dtype == torch.half
        if self.scale is None or len(self.scale) != len(images):
            self.scale = torch.ones(len(images), 1)
        with torch.enable_grad():  # such as a model of energies does, also in evaluation
            energy = images.detach().requires_grad_()
            (force,) = torch.autograd.grad(energy.square().sum(), energy)
        x = self.norm(self.conv(images + 0.1 * force)).flatten(1)
        if not self.remembered:
            self.remembered[0] = self.head.weight.new_ones(10)
        return self.head(self.dropout(x * self.expanded * self.scale)) * self.remembered[0]


def unusual(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Unusual()


def unusual_without_sparse(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    model = Unusual()
    model.sparse = None
    return model


def lazy(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))


class Thawing(nn.Module):
    """Trains its first layer later than its second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 8).requires_grad_(False), nn.Linear(8, 10)
        self.passes = 0

    def forward(self, images: Tensor) -> Tensor:
        self.passes += 1
        self.first.requires_grad_(self.passes > 2)
        return self.second(self.first(images.flatten(1)))


def thawing(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Thawing()


class Resized(nn.Module):
    """Resizes a buffer in place, as torch's observers for quantisation do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.register_buffer("largest", torch.zeros(0))

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        if self.training:
            self.largest.resize_(64 if len(self.largest) == 65 else 65).fill_(0).narrow(0, 0, 64).copy_(x.detach()[0])
        return self.head(x)


def resized(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Resized()


def scripted(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.1), nn.Flatten(), nn.Linear(144, 10))
    return torch.jit.script(layers)


class InPlace(nn.Module):
    """Takes no notice of what dropout returns."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.dropout = nn.Linear(64, 10), nn.Dropout(1.0, inplace=True)

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1).clone()
        self.dropout(x)
        assert not (self.training and x.any())
        return self.head(x)


def in_place(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return InPlace()


class Drawn(nn.Module):
    """Drawn from each generator there is when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.register_buffer("order", torch.tensor(random.sample(range(64), 64)))
        self.register_buffer("scale", torch.from_numpy(np.random.random(64).astype("float32")))  # noqa: NPY002

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.flatten(1)[:, self.order] * self.scale)


def drawn(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Drawn()


class FrozenBody(nn.Module):
    """A frozen layer before the one that is trained, and a cut in the middle of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        faults.passing("training" if self.training else "evaluation")
        return self.head(self.body(images.flatten(1)))


def frozen_body(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return FrozenBody()


def sparse_embedding(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Embedding(17, 8, sparse=True))


def nothing_to_train(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10).requires_grad_(False))


def no_parameters(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return nn.Flatten()


class Changed(nn.Module):
    """Makes something else of its logits before it returns them."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.head, self.change = nn.Linear(64, 10), change

    def forward(self, images: Tensor) -> object:
        return self.change(self.head(images.flatten(1)))


def in_a_dict(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Changed(lambda logits: {"logits": logits})


def four_dimensions(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Changed(lambda logits: logits[:, :, None, None])


def whole_numbers(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Changed(Tensor.long)


def complex_numbers(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Changed(lambda logits: logits.to(torch.complex64))


def detached(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Changed(Tensor.detach)


class OnlyInEvaluation(nn.Module):
    """Returns something else in evaluation."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.head, self.change = nn.Linear(64, 10), change

    def forward(self, images: Tensor) -> object:
        logits = self.head(images.flatten(1))
        return logits if self.training else self.change(logits)


def pair_in_evaluation(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return OnlyInEvaluation(lambda logits: (logits, logits))


def three_classes_in_evaluation(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return OnlyInEvaluation(lambda logits: logits[:, :3])


class ExtraState(nn.Module):
    """Has an extra state of its own in its state_dict, and is cut off in the middle of a pass."""

    def __init__(self, extra: object) -> None:
        super().__init__()
        self.head, self.extra = nn.Linear(64, 10), extra

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        assert (type(state), state) == (type(self.extra), self.extra)

    def forward(self, images: Tensor) -> Tensor:
        faults.passing("training" if self.training else "evaluation")
        return self.head(images.flatten(1))


def extra_numpy(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return ExtraState({"version": 3, "temperatures": [np.float64(1.5)]})


class ExtraNumpyLater(ExtraState):
    """Its extra state becomes a NumPy scalar in the first forward pass."""

    def forward(self, images: Tensor) -> Tensor:
        self.extra = np.float64(1.5)
        return super().forward(images)


def extra_numpy_later(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return ExtraNumpyLater(1.5)


def extra_tuple(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return ExtraState(({"shape": (3, 4)}, [1.5, OrderedDict(name="x")], {"a"}))


class OtherEachTime(nn.Module):
    """Takes its inputs in an order that is drawn when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.order = nn.Linear(64, 10), torch.randperm(64)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.flatten(1)[:, self.order])


def other_each_time(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return OtherEachTime()


class Versioned(FrozenBody):
    """Turns the weights of files that are older than it is, as torchvision's MNASNet does."""

    _version = 2

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, local_metadata: dict[str, int], *rest: list[str]
    ) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}head.weight"] = -state_dict[f"{prefix}head.weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)  # type: ignore[arg-type]


def versioned(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Versioned()


class Adapter(FrozenBody):
    """Keeps its frozen part, which is the same in each new model, out of its state_dict, as adapters (LoRA) do."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.eye_(self.body.weight)
        nn.init.zeros_(self.body.bias)

    def state_dict(self, *arguments: object, **options: object) -> dict[str, Tensor]:
        saved = super().state_dict(*arguments, **options)
        return {name: value for name, value in saved.items() if not name.startswith("body.")}

    def load_state_dict(self, state_dict: dict[str, Tensor], strict: bool = True, assign: bool = False) -> object:
        return super().load_state_dict(state_dict, strict=False, assign=assign)


def adapter(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Adapter()


def masked(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """Build a model that gives the least likely class no probability where it is evaluated."""

    def change(logits: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return logits
        return logits.masked_fill(logits == logits.amin(dim=1, keepdim=True), -torch.inf)

    return Changed(change)


class SlowToLoad(nn.Module):
    """Takes 2 seconds to take over a state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def load_state_dict(self, state_dict: dict[str, Tensor], strict: bool = True, assign: bool = False) -> object:
        time.sleep(2.0)
        return super().load_state_dict(state_dict, strict, assign)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.flatten(1))


def slow_to_load(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return SlowToLoad()
