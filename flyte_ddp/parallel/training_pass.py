"""What a rank's forward and backward pass is on, for the layers that depend on it."""

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
        self.untouched = Generators(torch.Generator(), random.Random(), np.random.RandomState())

    def __deepcopy__(self, _: object) -> TrainingPass:
        """Itself: a model's copy is not trained."""
        return self

    def begin(self, seed: int, epoch: int, samples: Indices, device: torch.device, *, counts: bool = True) -> None:
        """Sets the samples [N] of the pass that follows.

        Generators that a model may draw from itself are seeded by the position, so that a run that was cut off draws
        the same numbers again.
        """
        self.counts = counts
        if not self.may_draw:
            return
        # Another seed than augmentation's, whose bits would tell which pixels and which units go together.
        bits = sample_bits(seed + 2**32, epoch, samples)
        self.keys = copy_to_device(torch.from_numpy(bits.view(np.int64)), device)
        self.calls = {}
        for generators in (self.generators, self.untouched):
            generators.seed(int(bits[0]))
        if device.type == "cuda":
            torch.cuda.manual_seed(int(bits[0]))

    def done(self) -> None:
        """Notices, after the backward pass, whether the model has drawn random numbers itself.

        They depend on how samples fall to ranks. What puts the random state back, as ``fork_rng`` does, is not seen.
        """
        if not self.may_draw:
            return
        device = self.keys.device
        on_gpu = device.type == "cuda" and torch.cuda.default_generators[device.index].get_offset() > 0
        self.draws = self.draws or on_gpu or self.generators.draw() != self.untouched.draw()

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """[N, *shape] numbers in [0, 1), fp32: each sample has a SplitMix64 stream, of which each call takes a part.

        A block that is run again for the backward pass, such as torch.utils.checkpoint's, needs the numbers that it had
        before. What runs it puts torch's random state back, so a number drawn from that tells which call it is.
        """
        drawn = self.generators.draw_of_torch()
        if drawn not in self.calls:
            self.calls[drawn] = len(self.calls)
            self.untouched.draw_of_torch()
        position = torch.arange(math.prod(shape), device=self.keys.device) + (self.calls[drawn] << 32)
        bits = finalise(self.keys[:, None] + position * GOLDEN)
        return (shifted(bits, 40).float() / 2**24).view(-1, *shape)


class Generators(NamedTuple):
    """A random generator of torch (on the CPU), one of Python and one of NumPy; modules stand for their own."""

    of_torch: torch.Generator
    of_python: Any
    of_numpy: Any

    def seed(self, seed: int) -> None:
        """Seeds all three."""
        self.of_torch.manual_seed(seed)  # torch.manual_seed takes 200 us, as it looks for all kinds of devices
        self.of_python.seed(seed)
        self.of_numpy.seed(seed % 2**32)

    def draw(self) -> tuple[int, int, int]:
        """The next number of each."""
        return self.draw_of_torch(), self.of_python.getrandbits(32), self.of_numpy.randint(2**31)

    def draw_of_torch(self) -> int:
        """The next 63 bits of torch's."""
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=self.of_torch).item())


def finalise(x: Tensor) -> Tensor:
    """SplitMix64's output function (Steele, Lea and Flood, OOPSLA 2014) on int64, whose products wrap around."""
    x = (x ^ shifted(x, 30)) * FIRST
    x = (x ^ shifted(x, 27)) * SECOND
    return x ^ shifted(x, 31)


def shifted(x: Tensor, places: int) -> Tensor:
    """X >> places for the unsigned number with the same bits."""
    return (x >> places) & ((1 << (64 - places)) - 1)
