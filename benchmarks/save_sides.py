"""The time for which a save blocks a rank, against a clone of the same tensors.

Measured in a training, and in a user's function. A save is written to disk before the next side is timed.
"""

import json
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.running import write_data
from benchmarks.step_sides import COMMON, QUIET, make_images
from flyte_ddp import current_rank
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.launch.supervise.rank import configure_malloc
from flyte_ddp.core.runs.work import Work
from flyte_ddp.core.training.checkpointing import Checkpointer
from flyte_ddp.core.training.plan import TrainingJob
from flyte_ddp.core.training.recording import Recorder
from flyte_ddp.core.training.training_state import TrainingState
from flyte_ddp.datasets import open_prepared
from flyte_ddp.plans.identity import checkpoint_identity
from flyte_ddp.plans.opened_data import OpenedData
from flyte_ddp.plans.resolve import detect_hardware, request_ranks, resolve

WIDTH = 1024  # of a layer, whose weight takes 4 MiB; Adam keeps two more tensors of that size
Seconds = dict[str, list[float]]


def build_layers(num_classes: int, input_shape: tuple[int, int, int], layers: int) -> nn.Module:
    channels, height, width = input_shape
    inner = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)]
    first, last = nn.Linear(channels * height * width, WIDTH), nn.Linear(WIDTH, num_classes)
    return nn.Sequential(nn.Flatten(), first, *inner, last)


def time_training(layers: int, repeats: int) -> Seconds:
    options = json.dumps({"model": {"layers": layers}})
    own: dict[str, Any] = {"model": "benchmarks.save_sides:build_layers", "optimizer": "adamw", "batch_size": 8}
    hp = Hyperparameters(**{**COMMON, **own, "options": options})
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = write_data(folder / "data", make_images(64, 8, 1, 10))
        state = TrainingState(resolve(hp), detect_hardware(hp), OpenedData(hp, open_prepared(data)), None, QUIET)
        for parameter in state.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        state.optimizers[0].step()
        tensors = [*state.model.state_dict().values()]
        tensors += [value for each in state.optimizers[0].state.values() for value in each.values()]
        identity = checkpoint_identity(hp, data)
        work = Work("", TrainingJob(resolve(hp), data), request_ranks(hp), folder, identity, QUIET)
        with (
            closing(state.splits),
            closing(Recorder(folder, state)) as recorder,
            Checkpointer(work, state, recorder) as checkpoints,
        ):

            def save() -> None:
                state.step += 1
                checkpoints.save_epoch()

            return time_sides(save, checkpoints.wait_until_written, tensors, repeats)


def time_function(layers: int, repeats: int) -> Seconds:
    rank, tensors = current_rank(), [torch.ones(WIDTH, WIDTH) for _ in range(3 * layers)]
    (rank.folder / "metrics.jsonl").touch()
    steps = iter(range(repeats + 1))
    return time_sides(
        lambda: rank.save(next(steps), {"model": tensors}), rank._checkpoints.wait_until_written, tensors, repeats
    )


def time_sides(
    save: Callable[[], object], wait_until_written: Callable[[], object], tensors: list[Tensor], repeats: int
) -> Seconds:
    """Return both sides' seconds on one thread, in memory that the process has freed before, as in a CPU rank."""
    torch.set_num_threads(1)
    configure_malloc(retain=True)
    sides = {"save": save, "clone": lambda: [each.detach().clone() for each in tensors]}
    found: Seconds = {side: [] for side in sides}
    for repeat in range(repeats + 1):
        for side in [*sides] if repeat % 2 else [*reversed(sides)]:
            begin = time.perf_counter()
            result = sides[side]()
            seconds = time.perf_counter() - begin
            del result
            wait_until_written()
            if repeat:  # the first gets its memory from the kernel
                found[side].append(seconds)
    return found
