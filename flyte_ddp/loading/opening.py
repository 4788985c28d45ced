"""From a prepared data set to the splits that a rank trains on, validates with and tests on."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from flyte_ddp import sampling
from flyte_ddp.catalog import ENCODED_SIDE, encoded_kind
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.arrays import ImageArrays
from flyte_ddp.datasets.encoded_set import EncodedSet
from flyte_ddp.datasets.image_folder import ImageList
from flyte_ddp.datasets.prepared import PreparedSet, no_samples
from flyte_ddp.distributed import rank, world_size
from flyte_ddp.hardware import Hardware, cores
from flyte_ddp.loading.arrays import ArrayImages, on_device
from flyte_ddp.loading.encoded import BadSamples, EncodedImages, Reader
from flyte_ddp.loading.facts import Facts, together
from flyte_ddp.loading.files import FileImages
from flyte_ddp.loading.shards import ShardImages
from flyte_ddp.loading.split import Images, Split
from flyte_ddp.loading.streams import RankStream, StreamImages, StreamOrder
from flyte_ddp.sampling import Indices, ListedOrder
from flyte_ddp.settings import Settings
from flyte_ddp.shard_order import TEST_FRACTION, ShardOrder, ShardSplits, WholeShardSplits, lanes_of_rank
from flyte_ddp.shards.cache import ShardCache
from flyte_ddp.shards.dataset import ShardReader
from flyte_ddp.shards.index import ShardIndex

SampleOrder = ListedOrder | ShardOrder  # of samples that have numbers, unlike those of a stream


@dataclass(frozen=True)
class Splits:
    """The three splits, and what images are like in them: [H, W, C]."""

    training: Split
    validation: Split
    test: Split
    shape: tuple[int, int, int]

    @property
    def sources(self) -> list[Images]:
        """Where the images of all splits come from."""
        splits = (self.training, self.validation, self.test)
        return list({id(split.source): split.source for split in splits}.values())

    def facts(self) -> Facts:
        """About the images that this rank has loaded."""
        return together(source.facts() for source in self.sources)

    def close(self) -> None:
        """Ends the threads that load images, and closes files."""
        for source in self.sources:
            source.close()


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
    classes = len(data.classes) or hp.num_classes
    threads = settings.loader_threads or hardware.threads

    def images(source: ShardIndex | ImageList, orders: Collection[SampleOrder]) -> EncodedImages:
        return EncodedImages(
            reader(source, hp, settings),
            size=side,
            crop=hp.augment,
            seed=hp.seed,
            classes=classes,
            bad=BadSamples(hp.bad_samples),
            beside=in_the_same_split(orders),
            threads=threads,
            device=device,
        )

    orders = orders_of(data.train, hp, 0.0 if data.test is not None else TEST_FRACTION)
    train = images(data.train, orders.values())
    splits = {name: Split(train, order) for name, order in orders.items()}
    if data.test is not None:
        tests = whole(data.test)
        splits["test"] = Split(images(data.test, [tests]), tests)
    refuse_empty(splits["training"], "training", hp.dataset)
    refuse_empty(splits["test"], "testing", hp.dataset)
    if encoded_kind(hp.dataset) == "stream":
        splits["training"] = stream(data, hp, device, settings, StreamShape(side, classes, threads))
    return Splits(**splits, shape=(side, side, 3))


def refuse_empty(split: Split, purpose: str, dataset: str) -> None:
    """A split that must have samples has none."""
    if not len(split):
        raise no_samples(dataset, purpose)


def in_the_same_split(orders: Collection[SampleOrder]) -> Callable[[int], Indices]:
    """What may stand in for a sample, by the orders of splits that have no sample in common."""

    def beside(sample: int) -> Indices:
        for order in orders:
            found = order.beside(sample)
            place = int(np.searchsorted(found, sample))
            if place < len(found) and found[place] == sample:
                return found
        raise IndexError(f"sample {sample} is in no split")

    return beside


def open_tests(
    data: EncodedSet, size: int, classes: int, bad: BadSamples, *, device: torch.device, settings: Settings
) -> Split:
    """The test split alone, as :func:`open_splits` has it with any hyperparameters.

    Raises:
        UserError: it is empty.
    """
    hp = Hyperparameters(dataset=data.name, validation_fraction=0.0)
    source = data.train if data.test is None else data.test
    order = orders_of(source, hp, TEST_FRACTION)["test"] if data.test is None else whole(source)
    images = EncodedImages(
        reader(source, hp, settings),
        size=size,
        crop="none",
        seed=0,
        classes=classes,
        bad=bad,
        beside=in_the_same_split([order]),
        threads=settings.loader_threads or cores(),
        device=device,
    )
    split = Split(images, order)
    refuse_empty(split, "testing", data.name)
    return split


class StreamShape(NamedTuple):
    """Side of the images in pixels, number of classes, and workers of each rank."""

    side: int
    classes: int
    workers: int


def stream(
    data: EncodedSet, hp: Hyperparameters, device: torch.device, settings: Settings, shape: StreamShape
) -> Split:
    """Training samples as this rank's stream, of its own shards; an epoch has as many as all have, in whole batches."""
    assert isinstance(data.train, ShardIndex)
    test_fraction = 0.0 if data.test is not None else TEST_FRACTION
    shards = WholeShardSplits(data.train.counts, hp.validation_fraction, test_fraction, hp.seed).shards["training"]
    shards = shards[data.train.counts[shards] > 0]  # a worker must not have empty ones alone
    own = [data.train.shards[number] for number in shards[rank() :: world_size()].tolist()]
    options = RankStream(
        index=ShardIndex(data.train.name, own, data.train.parts, data.train.classes),
        cache=ShardCache(settings.cache_folder, settings.cache_bytes),
        rank=rank(),
        workers=shape.workers,
        buffer=hp.shuffle_buffer,
        size=shape.side,
        crop=hp.augment,
        seed=hp.seed,
        classes=shape.classes,
        bad_samples=hp.bad_samples,
    )
    samples = int(data.train.counts[shards].sum())
    return Split(StreamImages(options, device), StreamOrder(max(1, samples // hp.batch_size) * hp.batch_size))


def splits_of(source: ShardIndex, hp: Hyperparameters, test_fraction: float) -> ShardSplits | WholeShardSplits:
    """How the shards are divided up."""
    kind = WholeShardSplits if encoded_kind(hp.dataset) == "stream" else ShardSplits
    return kind(source.counts, hp.validation_fraction, test_fraction, hp.seed)


def reader(source: ShardIndex | ImageList, hp: Hyperparameters, settings: Settings) -> Reader:
    """What reads the images; shards are kept open, and fetched ahead, as far as this rank's lanes go."""
    if isinstance(source, ShardIndex):
        cache = ShardCache(settings.cache_folder, settings.cache_bytes)
        own = lanes_of_rank(hp.shuffle_shards, world_size(), min(hp.accumulation_steps, hp.batch_size))
        # Open are two for each lane, as all may change shards in the same step.
        return ShardImages(ShardReader(source, cache, most_open=2 * own), ahead=own)
    return FileImages(source)


def orders_of(source: ShardIndex | ImageList, hp: Hyperparameters, test_fraction: float) -> dict[str, SampleOrder]:
    """The samples of the three splits."""
    if isinstance(source, ShardIndex):
        parts = splits_of(source, hp, test_fraction)
        even, remote = np.ones(len(source.shards)), bool(source.remote.any())
        return {
            "training": ShardOrder(parts, "training", source.weights, hp.seed, hp.shuffle_shards, remote=remote),
            "validation": ShardOrder(parts, "validation", even, remote=remote),
            "test": ShardOrder(parts, "test", even, remote=remote),
        }
    rest, tests = sampling.split_indices(len(source.names), test_fraction, 0, sampling.TEST)
    chosen = sampling.split_indices(len(rest), hp.validation_fraction, hp.seed)
    training, validation = (rest[part] for part in chosen)
    return {
        "training": ListedOrder(training, hp.seed),
        "validation": ListedOrder(validation),
        "test": ListedOrder(tests),
    }


def whole(source: ShardIndex | ImageList) -> SampleOrder:
    """All samples, in their own order."""
    if isinstance(source, ShardIndex):
        everything = ShardSplits(source.counts, 0.0, 0.0, 0)
        return ShardOrder(everything, "training", np.ones(len(source.shards)), remote=bool(source.remote.any()))
    return ListedOrder(np.arange(len(source.names), dtype=np.int64))
