"""The samples of a rank's forward and backward pass, and random numbers that depend on these samples alone."""

import random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flyte_ddp.errors import UserError
from flyte_ddp.machine.device_copy import copy_to_device
from flyte_ddp.order.augmentation import FIRST, INCREMENT, SECOND, bits_of_one_sample, sample_bits
from flyte_ddp.order.sampling import Indices

PASSES_WATCHED, THEN_EVERY = 100, 10  # passes whose draws are looked for: the first ones, and later every tenth
# SplitMix64's increment and its two factors, as the int64 with the same bits.
GOLDEN, FIRST_FACTOR, SECOND_FACTOR = (word - 2**64 for word in (INCREMENT, FIRST, SECOND))
CALL = (INCREMENT << 32) % 2**64  # from a call's states to the next call's: 2**32 words, modulo 2**64


class TrainingPass:
    """The samples of a model's current pass, and their random numbers; BatchNorm and dropout layers refer to it."""

    def __init__(self, *, may_draw: bool = True) -> None:
        """If the model never draws random numbers (``may_draw`` False), nothing is seeded."""
        self.may_draw = may_draw
        self.passes = 0  # training passes that finish_pass has ended
        self.is_watched = False  # whether this pass's draws are looked for, which takes longer than seeding
        self.has_dropout = False  # whether layers call begin_call, so that they need states
        self.states = torch.zeros(0, dtype=torch.int64)  # [N], of the next call of a dropout layer
        # A tensor: Inductor would multiply a constant by a kernel's positions, and Triton refuses more than 64 bits.
        self.increment = torch.tensor(GOLDEN)
        self.device = self.states.device
        self.has_samples = True
        self.model_draws = False
        self.calls: dict[int, Tensor] = {}  # the states of each call in this pass, by torch's random bits at the call
        self.has_compiled_calls = False
        self.forward_done = False
        self.generators = Generators(torch.default_generator, random, np.random)
        self.reference = Generators(torch.Generator(), random.Random(), np.random.RandomState())

    def begin_pass(
        self, seed: int, epoch: int, samples: Indices, device: torch.device, *, has_samples: bool = True
    ) -> None:
        """Set the samples [N] of the next pass; seed the global generators of torch (CPU and GPU), Python and NumPy.

        The seed depends on ``seed``, ``epoch`` and the first sample, so that a resume draws the same numbers.
        ``has_samples`` is False if this rank runs another rank's sample, which must not count.
        """
        self.has_samples = has_samples
        if not self.may_draw:
            return
        seed += 2**32  # not augmentation's: dropout would be correlated with the augmentation of the same sample
        self.device = device
        if self.has_dropout:
            bits = sample_bits(seed, epoch, samples)
            self.states = copy_to_device(torch.from_numpy(bits.view(np.int64)), device)
            if self.increment.device.type != device.type:
                self.increment = copy_to_device(self.increment, device)
            self.calls = {}
            self.has_compiled_calls = False
        self.forward_done = False
        self.is_watched = not self.model_draws and (self.passes < PASSES_WATCHED or not self.passes % THEN_EVERY)
        first = bits_of_one_sample(seed, epoch, int(samples[0]))
        self.generators.seed_each(first)
        if self.is_watched:
            self.reference.seed_each(first)
        if device.type == "cuda":
            torch.cuda.manual_seed(first)

    def finish_forward(self) -> None:
        """Mark the end of the forward pass, after which dropout refuses a compiled block that runs again."""
        self.forward_done = True

    def finish_pass(self) -> None:
        """Set ``model_draws`` if the model itself has drawn from a global generator in its forward or backward pass.

        A model that restores the random state (``fork_rng``) is not noticed, nor one that draws late and seldom.
        """
        self.passes += 1
        if not self.is_watched:
            return
        on_gpu = self.device.type == "cuda" and torch.cuda.default_generators[self.device.index].get_offset() > 0
        self.model_draws = on_gpu or self.generators.draw_from_each() != self.reference.draw_from_each()

    def begin_call(self) -> Tensor:
        """Return the states, int64 [N], from which this call of a dropout layer draws; advance those of the pass."""
        states = self.states
        if torch.compiler.is_compiling() and not self.forward_done:
            self.states = states + CALL  # not in place: the compiled backward pass uses the states, too
            self.has_compiled_calls = True
            return states
        # torch.utils.checkpoint runs a block again in the backward pass, which then needs the same numbers. It first
        # restores torch's random state. So a number drawn from torch's generator tells which call this is.
        drawn = self.generators.draw_from_torch()
        if drawn not in self.calls:
            if self.forward_done and self.has_compiled_calls:
                raise UserError(
                    "dropout in compiled code that the backward pass runs again: it would get other random numbers "
                    "than in the forward pass; compile the function that calls torch.utils.checkpoint, not what that "
                    "runs"
                )
            self.calls[drawn] = states
            self.states = states + CALL
            self.reference.draw_from_torch()  # or finish_pass would take this draw for the model's
        return self.calls[drawn]


DRAWN = torch.empty((), dtype=torch.int64, device="cpu")  # is reused, as making it takes longer than drawing


class Generators(NamedTuple):
    """A generator of torch on the CPU, one of Python and one of NumPy; a module stands for its global generator."""

    torch_generator: torch.Generator
    python_generator: Any
    numpy_generator: Any

    def seed_each(self, seed: int) -> None:
        self.torch_generator.manual_seed(seed)  # torch.manual_seed takes 200 us, as it looks for all kinds of devices
        self.python_generator.seed(seed)
        self.numpy_generator.seed(seed % 2**32)

    def draw_from_each(self) -> tuple[int, int, float]:
        return self.draw_from_torch(), self.python_generator.getrandbits(32), self.numpy_generator.random_sample()

    def draw_from_torch(self) -> int:
        return int(DRAWN.random_(generator=self.torch_generator).item())


def mix_bits(x: Tensor) -> Tensor:
    """Replace int64 states by SplitMix64's output (Steele, Lea and Flood, OOPSLA 2014), in place; return them."""
    x ^= shift_right(x, 30)
    x *= FIRST_FACTOR  # products wrap around
    x ^= shift_right(x, 27)
    x *= SECOND_FACTOR
    x ^= shift_right(x, 31)
    return x


def shift_right(x: Tensor, places: int) -> Tensor:
    """Return x >> places for the unsigned numbers with the bits of the int64 x."""
    return (x >> places).bitwise_and_((1 << (64 - places)) - 1)
