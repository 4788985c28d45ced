"""Times of training steps of named cases, ours and those of a bare loop, in one process in turn, on a CPU or a GPU.

``python -m benchmarks.step_sides ORDER`` takes JSON and writes the seconds of a step in each block. Ours is the
library's step with its data path and its records. The bare loop does what a case asks for, crops and moving averages
too, with its data on the device, torch's fused optimiser and autocast, but checks, records and saves nothing.
"""

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.running import write_data
from benchmarks.sample_tasks import generate_table, generate_texts
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import ImageArrays, arrays, image_arrays, open_prepared
from flyte_ddp.datasets.sample_arrays import SampleArrays
from flyte_ddp.hardware import detect_hardware
from flyte_ddp.launch.supervise.rank import keep_freed_memory
from flyte_ddp.models import zoo
from flyte_ddp.models.images import InputSpec
from flyte_ddp.run import checkpoint_identity
from flyte_ddp.runs.work import Work, World
from flyte_ddp.settings import Settings
from flyte_ddp.training.job import Job, Training
from flyte_ddp.training.recording import Recorder
from flyte_ddp.training.train import remaining_batches, train_step
from flyte_ddp.training.training_state import TrainingState

COMMON = {"validation_fraction": 0.0, "schedule": "constant", "epochs": 1000, "num_ranks": 1, "learning_rate": 1e-3}
MOVED = 4  # pixels of the bare loop's crops, at most


def make_images(images: int, side: int, channels: int, classes: int) -> ImageArrays:
    """Return images of noise, with labels at random."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (images, side, side, channels), np.uint8)
    labels = generator.integers(0, classes, images)
    names = [str(number) for number in range(classes)]
    return image_arrays(pixels, labels, pixels[:8], labels[:8], names, name="noise")


def make_table(rows: int) -> SampleArrays:
    return arrays(generate_table(rows, 0), generate_table(8, 1), name="table")


def make_texts(texts: int, tokens: int, vocabulary: int) -> SampleArrays:
    made = (generate_texts(number, seed, tokens, vocabulary) for seed, number in enumerate((texts, 8)))
    return arrays(*made, name="texts")


class Case(NamedTuple):
    """What both sides train."""

    hp: dict[str, Any]  # beside COMMON
    data: Callable[[], ImageArrays | SampleArrays]
    steps: int  # of a block


MLP = {"model": "benchmarks.sample_tasks:build_mlp", "objective": "regression", "optimizer": "adamw"}
CASES = {
    "table of 50 columns, batch 8": Case(
        {**MLP, "batch_size": 8, "precision": "fp32"}, partial(make_table, 20_000), 400
    ),
    "small_cnn, batch 8": Case(
        {"model": "small_cnn", "batch_size": 8, "precision": "fp32"}, partial(make_images, 20_000, 28, 1, 10), 150
    ),
}


def train_ours(state: TrainingState, recorder: Recorder) -> Iterator[None]:
    """Do the library's steps, with their records."""
    while True:
        for batch in remaining_batches(state):
            train_step(state, recorder, batch)
            yield
        state.epoch += 1


def train_bare(state: TrainingState) -> Iterator[None]:
    """Do the steps of a plain loop on the training data of a state, with a model of its own."""
    hp, device = state.hp, state.device
    model = zoo.build_model(hp.model, state.objective.outputs, state.spec, hp.parse_options().get("model", {}))
    model = model.to(device).to(memory_format=state.memory_format)
    network = torch.compile(model) if hp.compile else model
    common: dict[str, Any] = {"lr": hp.learning_rate, "weight_decay": hp.weight_decay, "fused": True}
    if hp.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, nesterov=True, **common)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **common)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(hp.ema_decay)) if hp.ema_decay else None
    prepare = make_preparation(state)
    for inputs, targets in draw_batches(state):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=state.hardware.precision == "bf16"):
            outputs = network(prepare(inputs))
        if hp.objective == "regression":
            loss = functional.mse_loss(outputs.float().squeeze(1), targets)
        else:
            loss = functional.cross_entropy(outputs.float().flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        if average is not None:
            average.update_parameters(model)
        yield


def draw_batches(state: TrainingState) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield shuffled batches of inputs and targets that are on the device."""
    data: Any = state.data
    stored = (
        (data.train_images, data.train_labels)
        if isinstance(data, ImageArrays)
        else (data.train_inputs, data.train_targets)
    )
    inputs, targets = (torch.tensor(values, device=state.device) for values in stored)
    while True:
        for batch in torch.randperm(len(inputs), device=state.device).split(state.hp.batch_size):
            yield inputs[batch], targets[batch]


def make_preparation(state: TrainingState) -> Callable[[Tensor], Tensor]:
    """Return what makes the bare loop's inputs of stored ones; images [N, H, W, C] become normalised [N, C, H, W]."""
    spec = state.spec
    if not isinstance(spec, InputSpec):
        return lambda inputs: inputs
    mean, std = (torch.tensor(values, device=state.device) * 255 for values in (spec.mean, spec.std))
    move = move_and_mirror if state.hp.augment == "crop_flip" else torch.Tensor.contiguous

    def prepare(images: Tensor) -> Tensor:
        normalised = move(images).float().sub_(mean).div_(std).permute(0, 3, 1, 2)
        return normalised.contiguous(memory_format=state.memory_format)

    return prepare


def move_and_mirror(images: Tensor) -> Tensor:
    """Return images [N, H, W, C] that are moved by up to MOVED pixels, half of them mirrored."""
    count, height, width, _ = images.shape
    padded = functional.pad(images, (0, 0, MOVED, MOVED, MOVED, MOVED))
    number = torch.arange(count, device=images.device)[:, None, None]
    above, left = torch.randint(2 * MOVED + 1, (2, count, 1), device=images.device)
    rows = above + torch.arange(height, device=images.device)
    columns = left + torch.arange(width, device=images.device)
    columns = columns.where(torch.rand(count, 1, device=images.device) < 0.5, columns.flip(1))
    return padded[number, rows[:, :, None], columns[:, None, :]]


def time_blocks(order: dict[str, Any]) -> dict[str, list[float]]:
    """Return the seconds of a step in each block, by side; each side's first block is not counted."""
    case = CASES[order["case"]]
    hp = Hyperparameters(**{**COMMON, **case.hp})
    hardware = detect_hardware(hp)
    torch.set_num_threads(order.get("threads") or hardware.threads)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        data = write_data(Path(folder) / "data", case.data())
        training = Training(hp, hardware, Settings(progress="off"), data)
        world, identity = World(1, hardware.device_type), checkpoint_identity(hp, data)
        work = Work("", training, world, Path(folder), identity, timeout=600.0, save_seconds=1.0)
        state = TrainingState(hp, hardware, open_prepared(data), None)
        with closing(state.splits), closing(Recorder(Job.from_work(work), state)) as recorder:
            sides = {"ours": train_ours(state, recorder), "bare": train_bare(state)}
            found: dict[str, list[float]] = {side: [] for side in sides}
            for block in range(order["blocks"] + 1):
                for side, steps in sides.items():
                    seconds = time_steps(steps, order["steps"] or case.steps, state.device)
                    if block:
                        found[side].append(seconds)
    return found


def time_steps(steps: Iterator[None], number: int, device: torch.device) -> float:
    """Return the seconds of one of the next steps, until the device has done them all."""
    begin = time.perf_counter()
    for _ in itertools.islice(steps, number):
        pass
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / number


if __name__ == "__main__":
    received = json.loads(sys.argv[1])
    Path(received["output"]).write_text(json.dumps(time_blocks(received)))
