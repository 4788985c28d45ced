"""The samples of a rank's forward and backward pass, and random numbers that depend on these samples alone."""

import random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.machine.device_copy import copy_to_device
from flyte_ddp.core.order.augmentation import FIRST, INCREMENT, SECOND, draw_bits_of_one_sample, draw_sample_bits
from flyte_ddp.core.order.sampling import Indices

PASSES_WATCHED, THEN_EVERY = 100, 10  # passes that are checked for draws: the first 100, and later every tenth
# SplitMix64's increment and its two factors, as the int64 with the same bits.
GOLDEN, FIRST_FACTOR, SECOND_FACTOR = (word - 2**64 for word in (INCREMENT, FIRST, SECOND))
CALL = (INCREMENT << 32) % 2**64  # from a call's states to the next call's: 2**32 words, modulo 2**64


class TrainingPass:
    """The samples of a model's current pass, and the samples' random numbers.

    BatchNorm and dropout layers refer to this object.
    """

    def __init__(self, *, may_draw: bool = True) -> None:
        """Create a pass. If ``may_draw`` is False (the model never draws random numbers), nothing is seeded."""
        self.may_draw = may_draw
        self.passes = 0  # training passes that finish_pass has ended
        self.is_watched = False  # whether this pass is checked for draws, which takes longer than seeding
        self.has_dropout = False  # whether layers call take_dropout_states, which needs states
        self.states = torch.zeros(0, dtype=torch.int64)  # [N], of the next call of a dropout layer
        # A tensor: Inductor would multiply a constant by a kernel's positions, and Triton rejects more than 64 bits.
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
        """Set the samples [N] of the next forward and backward pass, and seed the global random generators.

        Seeds torch (CPU and GPU), Python and NumPy from ``seed``, ``epoch`` and the first sample. Thus a resumed run
        draws the same numbers. If ``may_draw`` is False, seeds nothing. ``has_samples`` is False if the samples are
        another rank's, and must not count.
        """
        self.has_samples = has_samples
        if not self.may_draw:
            return
        seed += 2**32  # not augmentation's seed: dropout would be correlated with a sample's augmentation
        self.device = device
        if self.has_dropout:
            bits = draw_sample_bits(seed, epoch, samples)
            self.states = copy_to_device(torch.from_numpy(bits.view(np.int64)), device)
            if self.increment.device.type != device.type:
                self.increment = copy_to_device(self.increment, device)
            self.calls = {}
            self.has_compiled_calls = False
        self.forward_done = False
        self.is_watched = not self.model_draws and (self.passes < PASSES_WATCHED or not self.passes % THEN_EVERY)
        first = draw_bits_of_one_sample(seed, epoch, int(samples[0]))
        self.generators.seed_each(first)
        if self.is_watched:
            self.reference.seed_each(first)
        if device.type == "cuda":
            torch.cuda.manual_seed(first)

    def finish_forward(self) -> None:
        """Mark the end of the forward pass, after which dropout rejects a compiled block that runs again."""
        self.forward_done = True

    def finish_pass(self) -> None:
        """Count the pass, and set ``model_draws`` if the model has drawn from a global random generator in this pass.

        Checks the first 100 passes, and then every tenth. A check draws from the global generators. Does not detect a
        model that restores the random state (``fork_rng``), nor a model that draws late and seldom.
        """
        self.passes += 1
        if not self.is_watched:
            return
        on_gpu = self.device.type == "cuda" and torch.cuda.default_generators[self.device.index].get_offset() > 0
        self.model_draws = on_gpu or self.generators.draw_from_each() != self.reference.draw_from_each()

    def take_dropout_states(self) -> Tensor:
        """Return the samples' random states, int64 [N], for a call of a dropout layer. Each call gets other states.

        If torch.utils.checkpoint runs a layer again in the backward pass, returns the states of the first run. Outside
        compiled code, draws a number from torch's global generator.

        Raises:
            UserError: The backward pass runs compiled code with dropout again.
        """
        states = self.states
        if torch.compiler.is_compiling() and not self.forward_done:
            self.states = states + CALL  # not in place: the compiled backward pass uses the states, too
            self.has_compiled_calls = True
            return states
        # torch.utils.checkpoint restores torch's random state, and runs a block again in the backward pass. The block
        # then needs the same numbers. So a number drawn from torch's generator identifies the call.
        drawn = self.generators.draw_from_torch()
        if drawn not in self.calls:
            if self.forward_done and self.has_compiled_calls:
                raise UserError(
                    "the backward pass runs compiled code with dropout again, and would draw other random numbers "
                    "than the forward pass; compile the function that calls torch.utils.checkpoint, not the function "
                    "that checkpoint runs"
                )
            self.calls[drawn] = states
            self.states = states + CALL
            self.reference.draw_from_torch()  # or finish_pass would count this draw as the model's
        return self.calls[drawn]


DRAWN = torch.empty((), dtype=torch.int64, device="cpu")  # reused, because making a tensor takes longer than drawing


class Generators(NamedTuple):
    """Random generators of torch (CPU), Python and NumPy. A module stands for its global generator."""

    torch_generator: torch.Generator
    python_generator: Any
    numpy_generator: Any

    def seed_each(self, seed: int) -> None:
        self.torch_generator.manual_seed(seed)  # torch.manual_seed takes 200 us, to look for all kinds of devices
        self.python_generator.seed(seed)
        self.numpy_generator.seed(seed % 2**32)

    def draw_from_each(self) -> tuple[int, int, float]:
        return self.draw_from_torch(), self.python_generator.getrandbits(32), self.numpy_generator.random_sample()

    def draw_from_torch(self) -> int:
        return int(DRAWN.random_(generator=self.torch_generator).item())


def mix_bits_in_place(x: Tensor) -> Tensor:
    """Turn int64 states into random bits in place, by SplitMix64's finaliser, and return ``x``.

    Callers add SplitMix64's increment before (Steele, Lea and Flood, OOPSLA 2014).
    """
    x ^= shift_right(x, 30)
    x *= FIRST_FACTOR  # products wrap around
    x ^= shift_right(x, 27)
    x *= SECOND_FACTOR
    x ^= shift_right(x, 31)
    return x


def shift_right(x: Tensor, places: int) -> Tensor:
    """Shift the int64 ``x`` right by ``places`` bits as if ``x`` were unsigned, and return a new tensor."""
    return (x >> places).bitwise_and_((1 << (64 - places)) - 1)
