"""From a prepared data set to the splits that a rank trains on, validates with and tests on."""

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
from flyte_ddp.datasets.prepared import PreparedSet, SampleOrder, no_samples, order_of_tests, orders_of
from flyte_ddp.hardware import Hardware, cores
from flyte_ddp.loading.arrays import open_array_images
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
    """Open the splits of a data set for a training with these hyperparameters; starts threads for encoded images."""
    orders = orders_of(data, hp)
    if isinstance(data, ImageArrays):
        images = open_array_images(device, data.train_images, data.train_labels, hp.augment, hp.seed)
        tests = open_array_images(device, data.test_images, data.test_labels)
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
    # Open are two shards for each shuffle stream of this rank, as all may change shards in the same step.
    streams = streams_of_rank(hp.shuffle_shards, world_size(), min(hp.accumulation_steps, hp.batch_size))
    of_train = [order for split, order in orders.items() if split != "test" or data.test is None]
    train = open_images(reader(data.train, settings, streams), substitutes=in_the_same_split(of_train))
    splits = {split: Split(train, order) for split, order in orders.items()}
    if data.test is not None:
        tests_only = in_the_same_split([orders["test"]])
        splits["test"] = Split(
            open_images(reader(data.test, settings, streams), substitutes=tests_only), orders["test"]
        )
    if encoded_kind(hp.dataset) == "stream":
        assert isinstance(data.train, ShardIndex)
        assert isinstance(orders["training"], ShardOrder)
        shards = np.flatnonzero(orders["training"].available)  # a worker must not have empty ones alone
        own = replace(data.train, shards=[data.train.shards[number] for number in shards[rank() :: world_size()]])
        stream = RankStream(own, open_cache(settings), hp, rank(), workers=threads, size=side, classes=classes)
        samples = max(1, len(orders["training"]) // hp.batch_size) * hp.batch_size
        splits["training"] = Split(StreamImages(stream, device), StreamOrder(samples))
    return Splits(**splits, shape=(side, side, 3))


def open_tests(
    data: EncodedSet, size: int, classes: int, bad: BadSamples, *, device: torch.device, settings: Settings
) -> Split:
    """Open the test split alone, as :func:`open_splits` has it; raise a UserError if it is empty."""
    order = order_of_tests(data)
    if not len(order):
        raise no_samples(data.name, "testing")
    images = EncodedImages(
        reader(data.tested, settings),
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
    """Return a function that gives what may replace a sample, by the orders of splits without common samples."""

    def substitutes(sample: int) -> Indices:
        for order in orders:
            found = order.substitutes(sample)
            place = int(np.searchsorted(found, sample))
            if place < len(found) and found[place] == sample:
                return found
        raise IndexError(f"sample {sample} is in no split")

    return substitutes


def reader(source: ShardIndex | ImageList, settings: Settings, streams: int = 16) -> Reader:
    """Return what reads the images; of shards, two for each of so many shuffle streams are kept open."""
    if isinstance(source, ImageList):
        return FileImages(source)
    return ShardImages(ShardReader(source, open_cache(settings), most_open=2 * streams, most_ahead=streams))


def open_cache(settings: Settings) -> ShardCache:
    """Return this host's cache of shards."""
    return ShardCache(settings.cache_folder, settings.cache_bytes)
