"""Images/s of a model limited by the interpreter: from shards by threads, by a process, and from arrays.

A step has 500 small operations and a backward pass, like the launches of a GPU's host. Decoding uses the other core.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import generated_images
from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.running import call
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.launch.supervise.rank import configure_malloc
from flyte_ddp.core.loading.arrays import open_array_batches
from flyte_ddp.core.loading.loader_threads import LoaderThreads
from flyte_ddp.core.loading.split import Split
from flyte_ddp.core.loading.workers import LoaderPool
from flyte_ddp.core.order.sampling import ListedOrder
from flyte_ddp.core.settings import Settings
from flyte_ddp.datasets import fetch, open_prepared
from flyte_ddp.datasets.encoded import opening
from flyte_ddp.plans.opened_data import OpenedData
from flyte_ddp.plans.resolve import detect_hardware

OPERATIONS, BATCH, SIDE = 500, 2, 64  # so that one core decodes a batch in less than a step
IMAGES, PER_SHARD = 2000, 250
POOLS: dict[str, Callable[[Sequence[Any]], LoaderThreads | LoaderPool]] = {
    "threads": lambda _: LoaderThreads(1),
    "processes": lambda loaders: LoaderPool(loaders, 1),
}


class ManyOperations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool, self.last = nn.AdaptiveAvgPool2d(4), nn.Linear(48, 10)
        self.factors = nn.Parameter(torch.ones(OPERATIONS // 2, 48))

    def forward(self, images: Tensor) -> Tensor:
        values: Tensor = self.pool(images).flatten(1)
        for factor in self.factors:
            values = torch.tanh(values * factor)
        result: Tensor = self.last(values)
        return result


def measure(options: Options) -> Result:
    result = Result(settings={"operations": OPERATIONS, "batch": BATCH, "side": SIDE, "images": IMAGES})
    images = PER_SHARD if options.quick else IMAGES
    index = generated_images.write_shards(options.folder / "shards", images // PER_SHARD, PER_SHARD)

    def run(number: int) -> None:
        order = {"index": str(index), "folder": str(options.folder / f"{number}"), "images": images}
        order["rounds"] = 1 if options.quick else 4
        for side, rates in call("benchmarks.feed:measure_rates", order).items():
            for rate in rates:
                result.add(side, rate, "images/s")

    interleaved(options, result, {"all sides": run}, options.number(4))
    for side in POOLS:
        figure = result.ratio(f"{side} / arrays", side, "arrays")
        bound = 0.95 if side == "processes" else None
        result.targets.append(Target(f"rate from shards by {side}, times arrays", figure, "x", at_least=bound))
    return result


def open_training(side: str, order: dict[str, Any]) -> Split:
    if side == "arrays":
        pixels = np.random.default_rng(0).integers(0, 256, (order["images"], SIDE, SIDE, 3), np.uint8)
        labels = np.arange(order["images"]) % 10
        source = open_array_batches(torch.device("cpu"), pixels, labels, keep_types=True)
        return Split(source, ListedOrder(np.arange(len(labels))))
    hp = Hyperparameters(
        dataset=f"shards:{order['index']}",
        augment="resized_crop",
        image_size=SIDE,
        batch_size=BATCH,
        test_dataset=f"shards:{order['index']}",
        validation_fraction=0.0,
        num_ranks=1,
    )
    folder = Path(order["folder"]) / side
    prepared = fetch(hp.dataset, "", folder / "prepared", test_dataset=hp.test_dataset, progress="off")
    opening.start_pool = lambda loaders, *_: POOLS[side](loaders)  # as start_pool chooses by the device
    settings = Settings(progress="off", cache_folder=folder / "cache")
    data, hardware = open_prepared(prepared), detect_hardware(hp)
    return OpenedData(hp, data).open_splits(hardware, torch.device("cpu"), settings).training


def train_epoch(split: Split, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> float:
    """Return the images/s of an epoch, which begins with nothing prefetched."""
    begin, images = time.perf_counter(), 0
    batches = split.order.batches(epoch, BATCH)
    for samples in split.iterate_with_prefetch(batches, lambda batch: [batch], epoch, BATCH):
        inputs, targets, *_ = split.load_batch(samples, epoch)
        outputs = model(inputs.permute(0, 3, 1, 2).float() / 255)
        nn.functional.cross_entropy(outputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        images += len(inputs)
    return images / (time.perf_counter() - begin)


def measure_rates(order: dict[str, Any]) -> dict[str, list[float]]:
    """Return the images/s of the epochs of all sides. The first epoch of each side is not counted."""
    torch.set_num_threads(1)
    configure_malloc(retain=True)
    model = ManyOperations()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    splits = {side: open_training(side, order) for side in ("arrays", *POOLS)}
    rates: dict[str, list[float]] = {side: [] for side in splits}
    for epoch in range(1 + order["rounds"]):
        for side, split in splits.items():
            rates[side].append(train_epoch(split, model, optimizer, epoch))
    return {side: values[1:] for side, values in rates.items()}
