"""Models for ``cost`` whose every second epoch runs without the guards that make resume possible.

In odd epochs (counted from 0) all guards work. The checkpoint of the previous epoch is copied and written. Each step's
loss is checked, and buffers are copied after each step. A lock is held during changes. Even epochs have no guards. Rank
0 adds up the processor time of the guards, and writes the sum to a file after each epoch.
"""

import itertools
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flyte_ddp.core.models.inputs import InputSpec
from flyte_ddp.core.parallel.buffers import Buffers
from flyte_ddp.core.parallel.distributed import rank
from flyte_ddp.core.runs.checkpoint_writer import Snapshot
from flyte_ddp.core.training.checkpointing import Checkpointer
from flyte_ddp.core.training.diagnosis import LossWatch
from flyte_ddp.core.training.training_state import TrainingState
from flyte_ddp.models.zoo import Tutorial

ACCOUNT = "FLYTE_DDP_COST_ACCOUNT"  # environment: where to
EXCLUDE_SNAPSHOTS, COPY_AFTER_STEP = TrainingState.exclude_snapshots, Buffers.copy_buffers_after_step
CHECK_LOSS, SAVE_EPOCH, WRITE = LossWatch.check_loss, Checkpointer.save_epoch, Checkpointer._write_snapshot
seconds: defaultdict[str, float] = defaultdict(float)
current = {"epoch": 0}


def guarded(epoch: int) -> bool:
    return epoch % 2 == 1


@contextmanager
def timed(what: str) -> Iterator[None]:
    begin = time.thread_time()
    yield
    seconds[what] += time.thread_time() - begin


@contextmanager
def exclude_snapshots(state: TrainingState) -> Iterator[None]:
    current["epoch"] = state.epoch
    if not guarded(state.epoch):
        yield
        return
    with timed("lock"):
        around = EXCLUDE_SNAPSHOTS(state)
        around.__enter__()
    yield
    with timed("lock"):
        around.__exit__(None, None, None)


def copy_buffers_after_step(buffers: Buffers) -> None:
    if guarded(current["epoch"]):
        with timed("buffers"):
            COPY_AFTER_STEP(buffers)


def check_loss(watch: LossWatch, epoch: int, step: int, loss_sum: Tensor, forward: Callable[[], object]) -> None:
    if guarded(epoch):
        with timed("loss"):
            CHECK_LOSS(watch, epoch, step, loss_sum, forward)


def save_epoch(checkpoints: Checkpointer) -> None:
    if guarded(checkpoints.state.epoch):  # of the epoch that begins, in whose time this falls
        with timed("copy"):
            SAVE_EPOCH(checkpoints)
    if rank() == 0:
        Path(os.environ[ACCOUNT]).write_text(json.dumps(seconds))


def write(checkpoints: Checkpointer, snapshot: Snapshot) -> None:
    with timed("write"):
        WRITE(checkpoints, snapshot)


def alternate() -> None:
    patched: Any
    for patched, functions in (
        (TrainingState, {"exclude_snapshots": exclude_snapshots}),
        (Buffers, {"copy_buffers_after_step": copy_buffers_after_step}),
        (LossWatch, {"check_loss": check_loss}),
        (Checkpointer, {"save_epoch": save_epoch, "_write_snapshot": write}),
    ):
        for name, function in functions.items():
            setattr(patched, name, function)


def tutorial(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    alternate()
    channels, height, width = input_shape
    return Tutorial(num_classes, InputSpec(channels, height, width, (0.0,) * channels, (1.0,) * channels))


def with_batch_norm(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """Return a small network with BatchNorm, for images of 28 x 28 pixels.

    The buffers of the network are kept after each step.
    """
    alternate()
    widths = [input_shape[0], 16, 32, 64]
    blocks = [
        nn.Sequential(nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU())
        for before, after in itertools.pairwise(widths)
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(64 * 16, num_classes))
