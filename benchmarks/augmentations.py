"""Images/s of a user's own augmentation, two loader processes against torch's DataLoader with two workers.

Both call the same function of torchvision v2 on the same arrays in files, and give batches of uint8 images to a loop
that converts them to floats. Ours also seeds each sample.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.running import run_python
from flyte_ddp.loading.own_items import ArrayItems, ItemImages
from flyte_ddp.loading.own_samples import OwnFunction
from flyte_ddp.loading.split import TargetSpec
from flyte_ddp.loading.worker_sources import WorkerImages
from flyte_ddp.loading.workers import LoaderPool
from flyte_ddp.lookahead import start_ahead

WORKERS, EPOCHS, AHEAD = 2, 3, 2
SIZES = {224: (1200, 64), 32: (20_000, 128)}  # by side: images, and those of a batch
COLOURS = v2.ColorJitter(0.2, 0.2)
PIPELINES = {
    224: v2.Compose([v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip(), COLOURS]),
    32: v2.Compose([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), COLOURS]),
}


def augment(image: NDArray[np.uint8], target: Any) -> tuple[Tensor, Any]:
    """The user's function."""
    return PIPELINES[len(image)](v2.functional.to_image(image)), target


class Rows(Dataset[tuple[Tensor, int]]):
    """The same images for a DataLoader."""

    def __init__(self, images: NDArray[np.uint8]) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return augment(np.array(self.images[number]), number % 10)


def measure(options: Options) -> Result:
    """Measure each size and side in a process of its own."""
    result = Result(settings={"workers": WORKERS, "images and batch by side": SIZES})
    output = options.folder / "rates.json"

    def run(side: int, kind: str, _: int) -> None:
        images = 4 * SIZES[side][1] if options.quick else SIZES[side][0]
        order = {"side": side, "kind": kind, "images": images, "folder": str(options.folder), "output": str(output)}
        run_python("benchmarks.augmentations", json.dumps(order))
        for rate in json.loads(output.read_text()):
            result.add(f"{side} pixels: {kind}", rate, "images/s")

    for side in SIZES:
        kinds = {kind: partial(run, side, kind) for kind in ("ours", "DataLoader")}
        interleaved(options, result, kinds, options.number(5))
        ratio = result.ratio(f"{side} pixels: ours / DataLoader", f"{side} pixels: ours", f"{side} pixels: DataLoader")
        at_least = 1.0 if side == 224 else None
        result.targets.append(Target(f"{side} pixels: as fast as DataLoader", ratio, "x", at_least=at_least))
    return result


def our_epochs(images: NDArray[np.uint8], batch_size: int) -> Callable[[int], Iterator[Tensor]]:
    """Return a function that yields the batches of an epoch."""
    own = OwnFunction("augment", "benchmarks.augmentations:augment")
    items, targets = ArrayItems(images, np.arange(len(images)) % 10), TargetSpec(np.dtype(np.int64), (), 10)
    loader = ItemImages(items, "generated", size=images.shape[1:], targets=targets, seed=0, augment=own)
    source = WorkerImages(loader, LoaderPool([loader], WORKERS), torch.device("cpu"))

    def epoch(number: int) -> Iterator[Tensor]:
        order = np.random.default_rng(number).permutation(len(images))

        def begin(start: int) -> NDArray[Any]:
            samples = order[start : start + batch_size]
            source.prefetch_batch(samples, number)
            return samples

        for samples in start_ahead(begin, range(0, len(images), batch_size), AHEAD):
            yield source.load_batch(samples, number).inputs

    return epoch


def their_epochs(images: NDArray[np.uint8], batch_size: int) -> Callable[[int], Iterator[Tensor]]:
    """Return a function that yields the batches of an epoch."""
    loader = DataLoader(Rows(images), batch_size, shuffle=True, num_workers=WORKERS, persistent_workers=True)
    return lambda _: (found for found, _ in loader)


def run_order(order: dict[str, Any]) -> list[float]:
    """Return the images/s of each epoch but the first, in which processes start."""
    torch.set_num_threads(1)
    side, path = order["side"], Path(order["folder"], f"{order['side']}.npy")
    if not path.exists():
        shape = order["images"], side, side, 3
        np.save(path, np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))
    images = np.load(path, mmap_mode="r")
    epoch = (our_epochs if order["kind"] == "ours" else their_epochs)(images, SIZES[side][1])
    rates = []
    for number in range(EPOCHS + 1):
        begin = time.perf_counter()
        for batch in epoch(number):
            batch.float().div_(255)
        rates.append(len(images) / (time.perf_counter() - begin))
    return rates[1:]


if __name__ == "__main__":
    received = json.loads(sys.argv[1])
    Path(received["output"]).write_text(json.dumps(run_order(received)))
