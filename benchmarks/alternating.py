"""Models for ``cost``: in the ranks that build them, every second epoch goes without what guards a run.

Odd epochs (counted from 0) are as always: a checkpoint of the epoch before is copied and written, each step's loss is
looked at, the buffers are kept after each step, and changes are made under a lock. Even ones have none of that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from flyte_ddp.checkpointing import Checkpointer
from flyte_ddp.diagnosis import LossWatch
from flyte_ddp.images import InputSpec
from flyte_ddp.models import Tutorial
from flyte_ddp.training_state import TrainingState


def guarded(epoch: int) -> bool:
    """Whether an epoch is as always."""
    return epoch % 2 == 1


def alternate() -> None:
    """Changes the library in this process, which is a rank."""
    changing, keep_buffers = TrainingState.changing, TrainingState.keep_buffers
    look, epoch_done = LossWatch.look, Checkpointer.epoch_done

    def changing_if_guarded(state: TrainingState) -> AbstractContextManager[None]:
        return changing(state) if guarded(state.epoch) else nullcontext()

    def keep_buffers_if_guarded(state: TrainingState) -> None:
        if guarded(state.epoch):
            keep_buffers(state)

    def look_if_guarded(watch: LossWatch, loss_sum: Tensor, forward: Callable[[], object]) -> None:
        if guarded(watch.state.epoch):
            look(watch, loss_sum, forward)

    def epoch_done_if_guarded(checkpoints: Checkpointer) -> None:
        if guarded(checkpoints.run.state.epoch):  # of the epoch that begins, in whose time this falls
            epoch_done(checkpoints)

    patched: Any = TrainingState
    patched.changing, patched.keep_buffers = changing_if_guarded, keep_buffers_if_guarded
    patched = LossWatch
    patched.look = look_if_guarded
    patched = Checkpointer
    patched.epoch_done = epoch_done_if_guarded


def tutorial(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """The tutorial's network."""
    alternate()
    channels, height, width = input_shape
    return Tutorial(num_classes, InputSpec(channels, height, width, (0.0,) * channels, (1.0,) * channels))


def with_batch_norm(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """A small network with BatchNorm, whose buffers are kept after each step; for images of 28 x 28 pixels."""
    alternate()
    widths = [input_shape[0], 16, 32, 64]
    blocks = [
        nn.Sequential(nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU())
        for before, after in itertools.pairwise(widths)
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(64 * 16, num_classes))
