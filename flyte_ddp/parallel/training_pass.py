"""The samples of a rank's forward and backward pass, and random numbers for the layers that depend on them."""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flyte_ddp.device_copy import copy_to_device
from flyte_ddp.order.augmentation import sample_bits
from flyte_ddp.order.sampling import Indices

GOLDEN, FIRST, SECOND = (
    word - 2**64 for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)  # as the int64 they wrap around to


class TrainingPass:
    """The samples of a forward and backward pass, and random numbers for them; one object for a model.

    ``counts`` is False where the rank has no sample of its own: then the pass is on another rank's, and must leave no
    trace. ``draws`` says whether the model has drawn random numbers itself so far.
    """

    def __init__(self, *, may_draw: bool = True) -> None:
        """``may_draw``: whether the model may draw random numbers; seeding for that takes tens of microseconds."""
        self.may_draw = may_draw
        self.keys = torch.zeros(0, dtype=torch.int64)
        self.counts = True
        self.draws = False
        self.calls: dict[int, int] = {}
        self.generators = Generators(torch.default_generator, random, np.random)
        self.reference = Generators(torch.Generator(), random.Random(), np.random.RandomState())

    def __deepcopy__(self, _: object) -> TrainingPass:
        """Return this object: a model's copy is not trained."""
        return self

    def begin_pass(self, seed: int, epoch: int, samples: Indices, device: torch.device, *, counts: bool = True) -> None:
        """Set the samples [N] of the pass that follows; seed the global generators of torch, Python and NumPy.

        A model may draw from these itself. They are seeded by the position, so that a resumed run draws the same.
        """
        self.counts = counts
        if not self.may_draw:
            return
        # Another seed than augmentation's, whose bits would tell which pixels and which units go together.
        bits = sample_bits(seed + 2**32, epoch, samples)
        self.keys = copy_to_device(torch.from_numpy(bits.view(np.int64)), device)
        self.calls = {}
        for generators in (self.generators, self.reference):
            generators.seed(int(bits[0]))
        if device.type == "cuda":
            torch.cuda.manual_seed(int(bits[0]))

    def end_pass(self) -> None:
        """Set ``draws`` if the model has drawn random numbers itself, in its forward or backward pass.

        Such numbers depend on how samples fall to ranks. A model that restores the random state (``fork_rng``) is not
        noticed.
        """
        if not self.may_draw:
            return
        device = self.keys.device
        on_gpu = device.type == "cuda" and torch.cuda.default_generators[device.index].get_offset() > 0
        self.draws = self.draws or on_gpu or self.generators.draw() != self.reference.draw()

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """Return [N, *shape] numbers in [0, 1), fp32; each sample has a SplitMix64 stream, each call a part of it.

        A block that is run again for the backward pass, such as torch.utils.checkpoint's, needs the numbers that it had
        before. What runs it restores torch's random state, so a number drawn from that tells which call it is.
        """
        drawn = self.generators.draw_of_torch()
        if drawn not in self.calls:
            self.calls[drawn] = len(self.calls)
            self.reference.draw_of_torch()
        position = torch.arange(math.prod(shape), device=self.keys.device) + (self.calls[drawn] << 32)
        bits = mix_bits(self.keys[:, None] + position * GOLDEN)
        return (shift_right(bits, 40).float() / 2**24).view(-1, *shape)


class Generators(NamedTuple):
    """A random generator of torch (on the CPU), one of Python and one of NumPy; a module stands for its global one."""

    of_torch: torch.Generator
    of_python: Any
    of_numpy: Any

    def seed(self, seed: int) -> None:
        """Seed all three."""
        self.of_torch.manual_seed(seed)  # torch.manual_seed takes 200 us, as it looks for all kinds of devices
        self.of_python.seed(seed)
        self.of_numpy.seed(seed % 2**32)

    def draw(self) -> tuple[int, int, int]:
        """Draw a number from each."""
        return self.draw_of_torch(), self.of_python.getrandbits(32), self.of_numpy.randint(2**31)

    def draw_of_torch(self) -> int:
        """Draw 63 bits from torch's."""
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=self.of_torch).item())


def mix_bits(x: Tensor) -> Tensor:
    """Return SplitMix64's output for int64 states (Steele, Lea and Flood, OOPSLA 2014); products wrap around."""
    x = (x ^ shift_right(x, 30)) * FIRST
    x = (x ^ shift_right(x, 27)) * SECOND
    return x ^ shift_right(x, 31)


def shift_right(x: Tensor, places: int) -> Tensor:
    """Return x >> places for the unsigned number with the same bits as the int64 x."""
    return (x >> places) & ((1 << (64 - places)) - 1)
