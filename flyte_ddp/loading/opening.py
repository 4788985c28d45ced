"""From a prepared data set to the splits that a rank trains on, validates with and tests on."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from flyte_ddp.catalog import ENCODED_SIDE, encoded_kind
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.arrays import ImageArrays
from flyte_ddp.datasets.encoded_set import EncodedSet
from flyte_ddp.datasets.image_folder import ImageList
from flyte_ddp.datasets.prepared import PreparedSet, SampleOrder, no_samples, orders_of
from flyte_ddp.hardware import Hardware, cores
from flyte_ddp.loading.arrays import ArrayImages, on_device
from flyte_ddp.loading.encoded import BadSamples, EncodedImages, Reader
from flyte_ddp.loading.files import FileImages
from flyte_ddp.loading.shards import ShardImages
from flyte_ddp.loading.split import Split, Splits
from flyte_ddp.loading.streams import RankStream, StreamImages, StreamOrder
from flyte_ddp.order.sampling import Indices
from flyte_ddp.order.shard_order import ShardOrder, streams_of_rank
from flyte_ddp.parallel.distributed import rank, world_size
from flyte_ddp.settings import Settings
from flyte_ddp.shards.cache import ShardCache
from flyte_ddp.shards.dataset import ShardReader
from flyte_ddp.shards.index import ShardIndex


def open_splits(
    data: PreparedSet, hp: Hyperparameters, hardware: Hardware, device: torch.device, settings: Settings
) -> Splits:
    """The splits of a data set, as the hyperparameters want them."""
    orders = orders_of(data, hp)
    if isinstance(data, ImageArrays):
        images = ArrayImages(*on_device(device, data.train_images, data.train_labels), hp.augment, hp.seed)
        tests = ArrayImages(*on_device(device, data.test_images, data.test_labels))
        _, height, width, channels = data.train_images.shape
        training, validation, test = orders.values()
        return Splits(Split(images, training), Split(images, validation), Split(tests, test), (height, width, channels))
    side = hp.image_size or ENCODED_SIDE
    classes = len(data.classes) or hp.num_classes
    threads = settings.loader_threads or hardware.threads
    open_images = partial(
        EncodedImages,
        size=side,
        crop=hp.augment,
        seed=hp.seed,
        classes=classes,
        bad=BadSamples(hp.bad_samples),
        threads=threads,
        device=device,
    )
    of_train = [order for split, order in orders.items() if split != "test" or data.test is None]
    train = open_images(reader(data.train, hp, settings), substitutes=in_the_same_split(of_train))
    splits = {split: Split(train, order) for split, order in orders.items()}
    if data.test is not None:
        tests_only = in_the_same_split([orders["test"]])
        splits["test"] = Split(open_images(reader(data.test, hp, settings), substitutes=tests_only), orders["test"])
    if encoded_kind(hp.dataset) == "stream":
        assert isinstance(data.train, ShardIndex)
        assert isinstance(orders["training"], ShardOrder)
        cache = ShardCache(settings.cache_folder, settings.cache_bytes)
        shards = np.flatnonzero(orders["training"].available)  # a worker must not have empty ones alone
        own = replace(data.train, shards=[data.train.shards[number] for number in shards[rank() :: world_size()]])
        stream = RankStream(own, cache, hp, rank(), workers=threads, size=side, classes=classes)
        samples = max(1, len(orders["training"]) // hp.batch_size) * hp.batch_size
        splits["training"] = Split(StreamImages(stream, device), StreamOrder(samples))
    return Splits(**splits, shape=(side, side, 3))


def open_tests(
    data: EncodedSet, size: int, classes: int, bad: BadSamples, *, device: torch.device, settings: Settings
) -> Split:
    """The test split alone, as :func:`open_splits` has it with any hyperparameters.

    Raises:
        UserError: it is empty.
    """
    hp = Hyperparameters(dataset=data.name, validation_fraction=0.0)
    order = orders_of(data, hp)["test"]
    if not len(order):
        raise no_samples(data.name, "testing")
    images = EncodedImages(
        reader(data.train if data.test is None else data.test, hp, settings),
        size=size,
        crop="none",
        seed=0,
        classes=classes,
        bad=bad,
        substitutes=in_the_same_split([order]),
        threads=settings.loader_threads or cores(),
        device=device,
    )
    return Split(images, order)


def in_the_same_split(orders: Collection[SampleOrder]) -> Callable[[int], Indices]:
    """What may replace a sample, by the orders of splits that have no sample in common."""

    def substitutes(sample: int) -> Indices:
        for order in orders:
            found = order.substitutes(sample)
            place = int(np.searchsorted(found, sample))
            if place < len(found) and found[place] == sample:
                return found
        raise IndexError(f"sample {sample} is in no split")

    return substitutes


def reader(source: ShardIndex | ImageList, hp: Hyperparameters, settings: Settings) -> Reader:
    """What reads the images; shards are kept open, and fetched ahead, for this rank's shuffle streams."""
    if isinstance(source, ImageList):
        return FileImages(source)
    cache = ShardCache(settings.cache_folder, settings.cache_bytes)
    own = streams_of_rank(hp.shuffle_shards, world_size(), min(hp.accumulation_steps, hp.batch_size))
    # Open are two for each stream, as all may change shards in the same step.
    return ShardImages(ShardReader(source, cache, most_open=2 * own, most_ahead=own))
