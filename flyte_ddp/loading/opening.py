"""Open the splits that a rank trains on, validates with and tests on."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from flyte_ddp.catalog import ENCODED_SIDE, encoded_kind
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.arrays import ImageArrays
from flyte_ddp.datasets.encoded_set import EncodedSet
from flyte_ddp.datasets.image_folder import ImageList
from flyte_ddp.datasets.prepared import PreparedSet, no_samples_error, order_splits, order_test_split, order_training
from flyte_ddp.hardware import Hardware
from flyte_ddp.loading.arrays import open_array_source
from flyte_ddp.loading.encoded import BadSamples, EncodedImages, ImageReader
from flyte_ddp.loading.own_samples import ArraySamples, OwnFunction, SampleLoader
from flyte_ddp.loading.readers import FileReader, ShardImages
from flyte_ddp.loading.split import Split, Splits
from flyte_ddp.loading.streams import RankStream, StreamImages, StreamOrder
from flyte_ddp.loading.workers import POSSIBLE, LoaderPool, WorkerImages
from flyte_ddp.machine import count_cores
from flyte_ddp.models.images import EVALUATION_SHARE, InputSpec
from flyte_ddp.order.sampling import Order
from flyte_ddp.order.shard_order import ShardOrder, count_rank_streams
from flyte_ddp.parallel.distributed import rank, world_size
from flyte_ddp.settings import Settings
from flyte_ddp.shards.cache import ShardCache
from flyte_ddp.shards.dataset import ShardReader
from flyte_ddp.shards.index import ShardIndex
from flyte_ddp.torchvision_weights import find_weights


def open_splits(
    data: PreparedSet, hp: Hyperparameters, hardware: Hardware, device: torch.device, settings: Settings
) -> Splits:
    """Open the training, validation and test split of a prepared data set for this rank, and return them.

    Copies arrays to the device if it is a GPU. Threads that decode encoded images, and worker processes of a stream,
    start at the first batch; :meth:`Splits.close` ends them. Without a process group this is rank 0 of 1.
    """
    orders = order_splits(
        data, validation_fraction=hp.validation_fraction, seed=hp.seed, shuffle_shards=hp.shuffle_shards
    )
    orders["training"] = order_training(data, orders["training"], hp.sampling)
    threads = settings.loader_threads or hardware.threads
    if isinstance(data, ImageArrays):
        return open_array_splits(data, orders, hp, device, threads)
    weights, classes = find_weights(hp.model, hp.init_from), len(data.classes) or hp.num_classes
    side = hp.image_size or (weights.side if weights else ENCODED_SIDE)
    share = weights.crop_share if weights else EVALUATION_SHARE
    # The reader keeps two shards open for each shuffle stream, because all may change shards in the same step.
    streams = count_rank_streams(hp.shuffle_shards, world_size(), min(hp.accumulation_steps, hp.batch_size))
    options: dict[str, Any] = {"size": side, "share": share, "crop": hp.augment, "seed": hp.seed, "classes": classes}
    options |= {"bad": BadSamples(hp.bad_samples), "threads": threads, "device": device}
    in_train = [order for split, order in orders.items() if split != "test" or data.test is None]
    train = EncodedImages(open_image_reader(data.train, settings, streams), orders=in_train, **options)
    splits = {split: Split(train, order) for split, order in orders.items()}
    if data.test is not None:
        tests = EncodedImages(open_image_reader(data.test, settings, streams), orders=[orders["test"]], **options)
        splits["test"] = Split(tests, orders["test"])
    if encoded_kind(hp.dataset) == "stream":
        assert isinstance(data.train, ShardIndex)
        assert isinstance(orders["training"], ShardOrder)
        shards = np.flatnonzero(orders["training"].available)  # without empty shards: a worker needs samples
        own = replace(data.train, shards=[data.train.shards[number] for number in shards[rank() :: world_size()]])
        cache = ShardCache(settings.cache_folder, settings.cache_bytes)
        stream = RankStream(own, cache, hp, rank(), workers=threads, size=side, share=share, classes=classes)
        samples = max(1, len(orders["training"]) // hp.batch_size) * hp.batch_size
        splits["training"] = Split(StreamImages(stream, device), StreamOrder(samples))
    return Splits(**splits, shape=(side, side, 3))


def open_array_splits(
    data: ImageArrays, orders: Mapping[str, Order], hp: Hyperparameters, device: torch.device, workers: int
) -> Splits:
    """Return the splits of arrays. With an ``augment`` of the user's own, ``workers`` processes load those to train on.

    Copies the arrays to the device if it is a GPU, but for training samples of loader processes.
    """
    own = OwnFunction("augment", hp.augment) if ":" in hp.augment else None
    images = open_array_source(device, data.train_images, data.train_labels, "none" if own else hp.augment, hp.seed)
    test_images = open_array_source(device, data.test_images, data.test_labels)
    _, height, width, channels = data.train_images.shape
    training, validation = (Split(images, orders[split]) for split in ("training", "validation"))
    if own:
        sizes = {"classes": len(data.classes), "image_size": hp.image_size}
        loader = ArraySamples(data.train_images, data.train_labels, own, seed=hp.seed, **sizes)
        training = Split(WorkerImages(loader, make_pool([loader], workers), device), orders["training"])
    return Splits(training, validation, Split(test_images, orders["test"]), (height, width, channels))


def make_pool(loaders: Sequence[SampleLoader], workers: int) -> LoaderPool | None:
    """Return a pool of loader processes; None where the rank must load its samples itself: not on Linux."""
    return LoaderPool(loaders, workers) if POSSIBLE else None


def open_test_split(
    data: EncodedSet, spec: InputSpec, classes: int, bad: BadSamples, *, device: torch.device, settings: Settings
) -> Split:
    """Open the test split of encoded images alone, and return it. Its decoding threads start at the first batch.

    ``spec`` is the input of the model that gets the images, a square; ``bad`` collects undecodable samples. Raises a
    UserError for an empty split.
    """
    order = order_test_split(data)
    if not len(order):
        raise no_samples_error(data.name, "testing")
    images = EncodedImages(
        open_image_reader(data.test_source, settings),
        orders=[order],
        size=spec.height,
        share=spec.crop_share,
        classes=classes,
        bad=bad,
        threads=settings.loader_threads or count_cores(),
        device=device,
    )
    return Split(images, order)


def open_image_reader(source: ShardIndex | ImageList, settings: Settings, streams: int = 16) -> ImageReader:
    """Return a reader of a list of image files, or of shards. Reads nothing yet.

    At most ``2 * streams`` shards stay open; at most ``streams`` are fetched ahead into the cache of ``settings``.
    """
    if isinstance(source, ImageList):
        return FileReader(source)
    cache = ShardCache(settings.cache_folder, settings.cache_bytes)
    return ShardImages(ShardReader(source, cache, most_open=2 * streams, most_ahead=streams))
