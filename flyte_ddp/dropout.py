"""Dropout as a function of (seed, epoch, sample), so that it does not depend on which rank a sample falls to."""

from __future__ import annotations

import math
import sys
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from flyte_ddp.augmentation import sample_bits
from flyte_ddp.sampling import Indices

GOLDEN, FIRST, SECOND = (
    word - 2**64 for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)  # as the int64 they wrap around to


class SampleRandomness:
    """Random numbers for the samples that a training pass is on: each has a SplitMix64 stream of its own."""

    def __init__(self) -> None:
        self.keys = torch.zeros(0, dtype=torch.int64)
        self.draws = 0

    def begin_pass(self, seed: int, epoch: int, samples: Indices, device: torch.device) -> None:
        """Sets the samples [N] of the forward pass that follows."""
        # Another seed than augmentation's, whose bits would tell which pixels and which units go together.
        bits = sample_bits(seed + 2**32, epoch, samples)
        self.keys = torch.from_numpy(bits.view(np.int64)).to(device)
        self.draws = 0

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """[N, *shape] numbers in [0, 1), fp32, other ones at each call of a pass."""
        position = torch.arange(math.prod(shape), device=self.keys.device) + (self.draws << 32)
        self.draws += 1
        bits = finalise(self.keys[:, None] + position * GOLDEN)
        return (shifted(bits, 40).float() / 2**24).view(-1, *shape)


def finalise(x: Tensor) -> Tensor:
    """SplitMix64's output function (Steele, Lea and Flood, OOPSLA 2014) on int64, whose products wrap around."""
    x = (x ^ shifted(x, 30)) * FIRST
    x = (x ^ shifted(x, 27)) * SECOND
    return x ^ shifted(x, 31)


def shifted(x: Tensor, places: int) -> Tensor:
    """X >> places for the unsigned number with the same bits."""
    return (x >> places) & ((1 << (64 - places)) - 1)


class SampleDropout(nn.Module):
    """Takes the place of a dropout layer or of torchvision's StochasticDepth: zeros whole values, channels or samples.

    Where the first dimension does not count the samples of the pass, it is the layer it replaces.
    """

    def __init__(self, layer: nn.Module, randomness: SampleRandomness) -> None:
        super().__init__()
        self.layer, self.randomness = layer, randomness
        self.training = layer.training

    def forward(self, values: Tensor) -> Tensor:
        """[N, ...] to the same shape; what is kept is scaled by 1 / (1 - p)."""
        p = cast("float", self.layer.p)
        if not self.training or p == 0.0:
            return values
        if values.shape[0] != len(self.randomness.keys):
            dropped: Tensor = self.layer(values)
            return dropped
        shape = values.shape[1 : self.drawn_dimensions(values)]
        keep = self.randomness.uniform(tuple(shape)) >= p
        scale = keep.to(values.dtype) / (1.0 - p) if p < 1.0 else keep.to(values.dtype)
        return values * scale.view(*scale.shape, *[1] * (values.dim() - scale.dim()))

    def drawn_dimensions(self, values: Tensor) -> int:
        """The leading dimensions that have a draw for each of their places."""
        if isinstance(self.layer, (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)):
            return 2
        return values.dim() if isinstance(self.layer, nn.Dropout) else 1


def derive_dropout_from_samples(model: nn.Module) -> SampleRandomness | None:
    """Has the model's dropout layers, in place, draw from what is returned; None if it has none.

    The names in its ``state_dict`` stay.
    """
    randomness = SampleRandomness()
    found = False
    for module in list(model.modules()):
        for name, child in module._modules.items():  # named_children leaves out a layer's second place
            if child is not None and is_dropout(child):
                setattr(module, name, SampleDropout(child, randomness))
                found = True
    return randomness if found else None


def is_dropout(module: nn.Module) -> bool:
    """Whether it is a layer that :class:`SampleDropout` can stand for; they have no parameters and no buffers."""
    if type(module) in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d):
        return True
    # A model can hold torchvision's layer only if torchvision has been imported.
    torchvision_ops = sys.modules.get("torchvision.ops")
    return torchvision_ops is not None and type(module) is torchvision_ops.StochasticDepth and module.mode == "row"
