"""Times of training steps of named cases, ours and a bare loop's in turn, on a CPU or a GPU.

Both sides run in the same process. Ours is the library's step with data path and records. The bare loop does the work
of a case, including crops and moving averages. The data is on the device, and the loop uses torch's fused optimiser and
autocast. It checks, records and saves nothing.
"""

import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.running import write_data
from benchmarks.sample_tasks import generate_table, generate_texts
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.launch.supervise.rank import configure_malloc
from flyte_ddp.core.machine.resources import detect_world
from flyte_ddp.core.models.inputs import InputSpec
from flyte_ddp.core.runs.work import Work
from flyte_ddp.core.settings import Settings
from flyte_ddp.core.training.plan import TrainingJob
from flyte_ddp.core.training.recording import Recorder
from flyte_ddp.core.training.train import iterate_remaining_batches, train_step
from flyte_ddp.core.training.training_state import TrainingState
from flyte_ddp.datasets import SampleArrays, arrays, fetch, image_arrays, open_prepared
from flyte_ddp.datasets.prepared_set import PreparedSet
from flyte_ddp.plans.identity import checkpoint_identity
from flyte_ddp.plans.opened_data import OpenedData
from flyte_ddp.plans.resolve import detect_hardware, request_ranks, resolve

QUIET = Settings(progress="off")
COMMON = {"validation_fraction": 0.0, "schedule": "constant", "epochs": 1000, "num_ranks": 1, "learning_rate": 1e-3}
GREY, PHOTOS = (20_000, 28, 1, 10), (2048, 224, 3, 1000)  # images, their side, channels and classes
MOVED = 4  # pixels of the bare loop's crops, at most


class Case(NamedTuple):
    hp: dict[str, Any]  # beside COMMON
    data: PreparedSet
    steps: int  # of a block


def image_case(model: str, batch_size: int, steps: int, *images: int, quick: bool, **hp: Any) -> Case:
    """Return a case of noise images with random labels, of the given number, side, channels and classes."""
    if quick:
        model, batch_size, images = "small_cnn", 8, (64, 32, 3, 10)
    return Case({**hp, "model": model, "batch_size": batch_size}, make_images(*(images or GREY)), steps)


def make_images(images: int, side: int, channels: int, classes: int) -> SampleArrays:
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (images, side, side, channels), np.uint8)
    labels = generator.integers(0, classes, images)
    return image_arrays(pixels, labels, pixels[:8], labels[:8], [*map(str, range(classes))], name="noise")


def table_case(width: int, batch_size: int, steps: int, rows: int = 20_000, *, quick: bool, **hp: Any) -> Case:
    hp |= {"model": "benchmarks.sample_tasks:build_mlp", "options": json.dumps({"model": {"width": width}})}
    hp |= {"objective": "regression", "optimizer": "adamw", "batch_size": batch_size}
    rows = batch_size if quick else rows
    return Case(hp, arrays(generate_table(rows, 0), generate_table(8, 1), name="table"), steps)


def gpt_case(dropout: float = 0.0, *, quick: bool, **hp: Any) -> Case:
    """Return a case of GPT-2 with 124 million parameters, or of a small GPT-2 if ``quick``."""
    batch, width, blocks, tokens, vocabulary = (2, 32, 2, 16, 64) if quick else (16, 768, 12, 1024, 50304)
    sizes = {"width": width, "blocks": blocks, "heads": blocks, "tokens": tokens, "vocabulary": vocabulary}
    hp |= {"model": "benchmarks.sample_tasks:GPT", "objective": "language", "num_classes": vocabulary}
    hp |= {"options": json.dumps({"model": {**sizes, "tied": True, "dropout": dropout}})}
    hp |= {"optimizer": "adamw", "batch_size": batch, "test_batch_size": batch}
    made = (generate_texts(number, number, tokens, vocabulary) for number in (32 * batch, 8))
    return Case(hp, arrays(*made, name="texts"), steps=6)


CASES: dict[str, Callable[..., Case]] = {
    "table of 50 columns, batch 8": partial(table_case, 64, 8, 400, precision="fp32"),
    "small_cnn, batch 8": partial(image_case, "small_cnn", 8, 150, precision="fp32"),
    "ResNet-50, 224 px, batch 256": partial(image_case, "resnet50", 256, 6, *PHOTOS),
    "ResNet-50 from shards": partial(image_case, "resnet50", 256, 6, augment="resized_crop"),
    "ViT-B/16, batch 128": partial(image_case, "vit_b_16", 128, 6, *PHOTOS, optimizer="adamw"),
    "GPT-2, 16 x 1,024 tokens": gpt_case,
    "GPT-2, compiled": partial(gpt_case, compile=True),
    "GPT-2, dropout in 24 layers": partial(gpt_case, dropout=0.1),
    "ResNet-18, 32 px, batch 512": partial(image_case, "resnet18", 512, 20, 20_480, 32, 3, 10),
    "small_cnn, batch 256": partial(image_case, "small_cnn", 256, 60),
    "small_cnn, crop_flip, moving average": partial(
        image_case, "small_cnn", 256, 60, augment="crop_flip", ema_decay=0.99
    ),
    "table of 50 columns, batch 1,024": partial(table_case, 256, 1024, 100, 200_000),
}


def train_ours(state: TrainingState, recorder: Recorder) -> Iterator[int]:
    """Run the library's steps, with their records, and yield each global batch's number of samples."""
    while True:
        for batch in state.clock.iterate_and_time_steps(iterate_remaining_batches(state)):
            train_step(state, recorder, batch)
            yield len(batch)
        state.epoch += 1


def train_bare(state: TrainingState) -> Iterator[None]:
    """Run the steps of a plain loop on the training data of a state, with a separate model."""
    hp, device = cast("Hyperparameters", state.plan.hyperparameters), state.device
    model = state.plan.model.build(state.objective.outputs, state.spec)
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
    data: Any = cast("OpenedData", state.data).prepared
    first = [*data.list_arrays().values()][:2]  # of training
    inputs, targets = (torch.tensor(values, device=state.device) for values in first)
    while True:
        for batch in torch.randperm(len(inputs), device=state.device).split(state.plan.loop.batch_size):
            yield inputs[batch], targets[batch]


def make_preparation(state: TrainingState) -> Callable[[Tensor], Tensor]:
    """Return the function that converts stored inputs to inputs of the bare loop.

    Images [N, H, W, C] become normalised [N, C, H, W].
    """
    spec, hp = state.spec, cast("Hyperparameters", state.plan.hyperparameters)
    if not isinstance(spec, InputSpec):
        return lambda inputs: inputs
    mean, std = (torch.tensor(values, device=state.device) * 255 for values in (spec.mean, spec.std))
    move, order = move_and_mirror if hp.augment == "crop_flip" else torch.Tensor.contiguous, state.memory_format
    return lambda images: move(images).float().sub_(mean).div_(std).permute(0, 3, 1, 2).contiguous(memory_format=order)


def move_and_mirror(images: Tensor) -> Tensor:
    """Return images [N, H, W, C] moved by up to MOVED pixels, half of which are mirrored."""
    count, height, width, _ = images.shape
    padded = functional.pad(images, (0, 0, MOVED, MOVED, MOVED, MOVED))
    above, left = torch.randint(2 * MOVED + 1, (2, count, 1), device=images.device)
    rows = above + torch.arange(height, device=images.device)
    columns = left + torch.arange(width, device=images.device)
    columns = columns.where(torch.rand(count, 1, device=images.device) < 0.5, columns.flip(1))
    return padded[torch.arange(count, device=images.device)[:, None, None], rows[:, :, None], columns[:, None, :]]


def time_blocks(order: dict[str, Any]) -> dict[str, list[float]]:
    """Return the seconds of a step in each block, by side. The first block of each side is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        return time_blocks_in(Path(folder), order)


def time_blocks_in(folder: Path, order: dict[str, Any]) -> dict[str, list[float]]:
    case = CASES[order["case"]](quick=order["quick"])
    hp = Hyperparameters(**{**COMMON, **case.hp, **order.get("hp", {})})
    if hp.test_dataset:
        data = fetch(hp.dataset, "", folder / "data", test_dataset=hp.test_dataset, progress="off")
    else:
        data = write_data(folder / "data", case.data)
    settings = Settings(progress="off", cache_folder=folder / "cache")
    hardware = detect_hardware(hp)
    torch.set_num_threads(order.get("threads") or hardware.threads)
    configure_malloc(retain=True)
    state = TrainingState(resolve(hp), hardware, OpenedData(hp, open_prepared(data)), None, settings)
    with closing(state.splits), closing(Recorder(folder, state)) as recorder:
        sides: dict[str, Iterator[object]] = {"ours": train_ours(state, recorder), "bare": train_bare(state)}
        found: dict[str, list[float]] = {side: [] for side in order.get("sides", sides)}
        for block in range(order["blocks"] + 1):
            for side, values in found.items():
                seconds = time_steps(sides[side], 2 if order["quick"] else case.steps, state.device)
                if block:
                    values.append(seconds)
    return found


def make_work(hp: Hyperparameters, data: Path, folder: Path, settings: Settings = QUIET) -> Work:
    """Return the work of ranks that train on this machine and keep their files in ``folder``."""
    request, identity = request_ranks(hp), checkpoint_identity(hp, data)
    world = detect_world(request)
    return Work("", TrainingJob(resolve(hp), data), request, folder, identity, settings, world=world)


def time_steps(steps: Iterator[object], number: int, device: torch.device) -> float:
    """Return the seconds per step of the next steps, until the device has finished all."""
    begin = time.perf_counter()
    for _ in itertools.islice(steps, number):
        pass
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / number
