"""Models for grey images of 8x8 pixels. Ranks must compute the same as one process. Some models rerun blocks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

Run = Callable[[nn.Module, Tensor], Tensor]


def reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)


def not_reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def nested(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda y: not_reentrant(block, y), x, use_reentrant=False)


def nested_reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda y: reentrant(block, y), x, use_reentrant=True)


def sequential(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint_sequential(block, 2, x, use_reentrant=False)


class Blocks(nn.Module):
    """A stem, three blocks with a configurable call, and a head. One dropout layer is used twice in each block."""

    def __init__(self, block: Callable[[], nn.Module], run: Run) -> None:
        super().__init__()
        self.stem, self.run = nn.Linear(64, 16), run
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images.flatten(1))
        for block in self.blocks:
            x = self.run(block, x) if self.training else block(x)
        return self.head(x.flatten(1))


class Place(nn.Module):
    """One place of a layer with several places. Otherwise checkpoint_sequential would drop all but the first place."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def with_dropout() -> nn.Module:
    twice = nn.Dropout(0.4)
    return nn.Sequential(nn.Linear(16, 16), Place(twice), nn.ReLU(), nn.Linear(16, 16), Place(twice))


def with_batch_norm() -> nn.Module:
    """Return a block that ends with BatchNorm. A rerun then stops in the middle of the block."""
    again = (nn.Flatten(), nn.Linear(16, 16), nn.Unflatten(1, (4, 2, 2)))
    return nn.Sequential(*again, nn.BatchNorm2d(4), nn.ReLU(), *again, nn.BatchNorm2d(4))


RUNS: dict[str, Run] = {
    "plain": lambda block, x: block(x),
    **{run.__name__: run for run in (reentrant, not_reentrant, nested, nested_reentrant, sequential)},
}


def _factory(block: Callable[[], nn.Module], run: Run) -> Callable[..., nn.Module]:
    return lambda **_: Blocks(block, run)


for _name, _run in RUNS.items():  # dropout_plain, batch_norm_reentrant and so on
    globals()[f"dropout_{_name}"] = _factory(with_dropout, _run)
    globals()[f"batch_norm_{_name}"] = _factory(with_batch_norm, _run)


class Tutorials(nn.Module):
    """Uses shapes as tutorials do, and fails on an empty batch or on strides of another order."""

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, affine=True)
        self.attention = nn.MultiheadAttention(36, 2, batch_first=True)
        self.head = nn.Linear(144, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.conv(images))
        x = x.view(x.size(0), -1).reshape(x.size(0), 4, -1)
        x, _ = self.attention(x, x, x, need_weights=False)
        x = x.reshape(x.size(0), -1)
        assert int(x.argmax(1).max()) >= 0  # fails on an empty batch
        return self.head(x / x.amax(dim=1, keepdim=True).abs().clamp(min=1))


class LeavesOut(nn.Module):
    """Skips one of two layers with BatchNorm in each pass. Different ranks use different layers."""

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(2))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers[int(torch.rand(()) < 0.5)](images.flatten(1)))


class Penalty(torch.autograd.Function):
    """Returns the value, and adds another loss, as layers that distribute samples over experts."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        [weight] = ctx.saved_tensors
        return gradient, 0.02 * weight


class Penalised(nn.Module):
    """Has gradients that do not come from the loss: from a hook, and from the model's additional loss."""

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 8), nn.Linear(8, 10)
        self.first.weight.register_hook(lambda gradient: gradient + 0.05 * self.first.weight.detach())

    def forward(self, images: Tensor) -> Tensor:
        return self.second(Penalty.apply(self.first(images.flatten(1)).tanh(), self.second.weight))


class Complex(nn.Module):
    """Has a complex parameter, as models in the frequency domain do."""

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.filter, self.head = nn.Parameter(torch.randn(8, 5, dtype=torch.cdouble)), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        filtered = torch.fft.rfft2(images[:, 0]) * self.filter
        return self.head(torch.fft.irfft2(filtered, s=(8, 8)).flatten(1))
