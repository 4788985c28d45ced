"""From a prepared data set to the splits that a rank trains on, validates with and tests on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from flyte_ddp import sampling
from flyte_ddp.catalog import ENCODED_SIDE
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.arrays import ImageArrays
from flyte_ddp.datasets.encoded_set import EncodedSet
from flyte_ddp.datasets.image_folder import ImageList
from flyte_ddp.datasets.prepared import PreparedSet
from flyte_ddp.distributed import world_size
from flyte_ddp.hardware import Hardware
from flyte_ddp.loading.arrays import ArrayImages, on_device
from flyte_ddp.loading.encoded import EncodedImages, Reader
from flyte_ddp.loading.files import FileImages
from flyte_ddp.loading.shards import ShardImages
from flyte_ddp.loading.split import Split
from flyte_ddp.sampling import Indices, ListedOrder, Order
from flyte_ddp.settings import Settings
from flyte_ddp.shard_order import TEST_FRACTION, ShardOrder, ShardSplits
from flyte_ddp.shards.cache import ShardCache
from flyte_ddp.shards.dataset import ShardReader
from flyte_ddp.shards.index import ShardIndex


@dataclass(frozen=True)
class Splits:
    """The three splits, and what images are like in them: [H, W, C]."""

    training: Split
    validation: Split
    test: Split
    shape: tuple[int, int, int]

    def close(self) -> None:
        """Ends the threads that load images, and closes files."""
        for split in (self.training, self.validation, self.test):
            split.source.close()


def open_splits(
    data: PreparedSet, hp: Hyperparameters, hardware: Hardware, device: torch.device, settings: Settings
) -> Splits:
    """The splits of a data set, as the hyperparameters want them."""
    if isinstance(data, ImageArrays):
        return array_splits(data, hp, device)
    return encoded_splits(data, hp, hardware, device, settings)


def array_splits(arrays: ImageArrays, hp: Hyperparameters, device: torch.device) -> Splits:
    """Of arrays: a part of the training samples, chosen at random, is for validation."""
    training, validation = sampling.split_indices(len(arrays.train_labels), hp.validation_fraction, hp.seed)
    images = ArrayImages(*on_device(device, arrays.train_images, arrays.train_labels), hp.augment, hp.seed)
    tests = ArrayImages(*on_device(device, arrays.test_images, arrays.test_labels))
    _, height, width, channels = arrays.train_images.shape
    return Splits(
        Split(images, ListedOrder(training, hp.seed)),
        Split(images, ListedOrder(validation)),
        Split(tests, ListedOrder(np.arange(len(arrays.test_labels), dtype=np.int32))),
        (height, width, channels),
    )


def encoded_splits(
    data: EncodedSet, hp: Hyperparameters, hardware: Hardware, device: torch.device, settings: Settings
) -> Splits:
    """Of encoded images: without a test set of its own, a tenth of the samples is for testing, whatever the seed."""
    side = hp.image_size or ENCODED_SIDE

    def images(source: ShardIndex | ImageList) -> EncodedImages:
        return EncodedImages(
            reader(source, hp, settings),
            size=side,
            crop=hp.augment,
            seed=hp.seed,
            classes=len(data.classes) or hp.num_classes,
            bad_samples=hp.bad_samples,
            threads=max(1, settings.loader_threads or hardware.threads),
            device=device,
        )

    train, test_fraction = images(data.train), 0.0 if data.test is not None else TEST_FRACTION
    orders = orders_of(data.train, hp, test_fraction)
    splits = {name: Split(train, order) for name, order in orders.items()}
    if data.test is not None:
        splits["test"] = Split(images(data.test), whole(data.test))
    return Splits(**splits, shape=(side, side, 3))


def reader(source: ShardIndex | ImageList, hp: Hyperparameters, settings: Settings) -> Reader:
    """What reads the images; of shards, which cannot leave the cache while they are open, no more than it needs are."""
    if isinstance(source, ShardIndex):
        cache = ShardCache(settings.cache_folder, settings.cache_bytes)
        return ShardImages(ShardReader(source, cache, most_open=-(-hp.shuffle_shards // world_size()) + 1))
    return FileImages(source)


def orders_of(source: ShardIndex | ImageList, hp: Hyperparameters, test_fraction: float) -> dict[str, Order]:
    """The samples of the three splits."""
    if isinstance(source, ShardIndex):
        parts = ShardSplits(source.counts, hp.validation_fraction, test_fraction, hp.seed)
        weights = np.array([source.parts[shard.part].weight for shard in source.shards])
        even = np.ones(len(source.shards))
        return {
            "training": ShardOrder(parts, "training", weights, hp.seed, hp.shuffle_shards),
            "validation": ShardOrder(parts, "validation", even),
            "test": ShardOrder(parts, "test", even),
        }
    rest, tests = sampling.split_indices(len(source.names), test_fraction, 0, sampling.TEST)
    chosen = sampling.split_indices(len(rest), hp.validation_fraction, hp.seed)
    training, validation = (rest[part] for part in chosen)
    return {
        "training": ListedOrder(training, hp.seed),
        "validation": ListedOrder(validation),
        "test": ListedOrder(tests),
    }


def whole(source: ShardIndex | ImageList) -> Order:
    """All samples, in their own order."""
    if isinstance(source, ShardIndex):
        return ShardOrder(ShardSplits(source.counts, 0.0, 0.0, 0), "training", np.ones(len(source.shards)))
    everything: Indices = np.arange(len(source.names), dtype=np.int64)
    return ListedOrder(everything)
