"""Open the splits that a rank trains on, validates with and tests on."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from flyte_ddp.catalog import ENCODED_SIDE, encoded_kind
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.encoded_set import EncodedSet
from flyte_ddp.datasets.image_folder import ImageList
from flyte_ddp.datasets.images import ImageArrays
from flyte_ddp.datasets.prepared import (
    PreparedSet,
    SampleOrder,
    has_pictures,
    no_samples_error,
    order_splits,
    order_test_split,
    order_training,
)
from flyte_ddp.hardware import Hardware
from flyte_ddp.loading.encoded import BadSamples, EncodedImages, ImageReader
from flyte_ddp.loading.opening_items import open_image_splits, open_leaf_splits
from flyte_ddp.loading.own_encoded import EncodedSamples
from flyte_ddp.loading.own_samples import OwnFunction, import_own_loading
from flyte_ddp.loading.readers import FileMembers, FileReader, ShardImages, ShardMembers
from flyte_ddp.loading.split import BatchSource, Split, Splits, TargetSpec, make_splits
from flyte_ddp.loading.streams import RankStream, StreamImages, StreamOrder
from flyte_ddp.loading.worker_sources import WorkerImages
from flyte_ddp.loading.workers import make_pool
from flyte_ddp.machine import count_cores
from flyte_ddp.models.images import EVALUATION_SHARE, InputSpec
from flyte_ddp.order.shard_order import ShardOrder, count_rank_streams
from flyte_ddp.parallel.distributed import rank, world_size
from flyte_ddp.settings import Settings
from flyte_ddp.shards.cache import ShardCache
from flyte_ddp.shards.dataset import ShardReader
from flyte_ddp.shards.index import ShardIndex
from flyte_ddp.torchvision_weights import choose_side, find_weights


def open_splits(
    data: PreparedSet, hp: Hyperparameters, hardware: Hardware, device: torch.device, settings: Settings
) -> Splits:
    """Open the training, validation and test split of a prepared data set for this rank, and return them.

    Copies arrays to a GPU that has room. :meth:`Splits.close` ends threads and processes that load. Without a process
    group this is rank 0 of 1.
    """
    orders = order_splits(
        data, validation_fraction=hp.validation_fraction, seed=hp.seed, shuffle_shards=hp.shuffle_shards
    )
    orders["training"] = order_training(data, orders["training"], hp.sampling)
    threads = settings.loader_threads or hardware.threads
    if isinstance(data, EncodedSet):
        return open_encoded_splits(data, orders, hp, device, threads=threads, settings=settings)
    if isinstance(data, ImageArrays) or has_pictures(data):
        return open_image_splits(data, orders, hp, device, threads)
    return open_leaf_splits(data, orders, hp, device, threads)


def open_encoded_splits(
    data: EncodedSet,
    orders: dict[str, SampleOrder],
    hp: Hyperparameters,
    device: torch.device,
    *,
    threads: int,
    settings: Settings,
) -> Splits:
    """Return the splits of encoded images, decoded by ``threads`` threads, or processes with the user's own code."""
    weights, classes = find_weights(hp.model, hp.init_from), len(data.classes) or hp.num_classes
    side = choose_side(hp.image_size, weights) or ENCODED_SIDE
    share = weights.crop_share if weights else EVALUATION_SHARE
    # The reader keeps two shards open for each shuffle stream, because all may change shards in the same step.
    ranks = 1 if hp.mixup else world_size()  # a sample's partner may be any other sample of the global batch
    streams = count_rank_streams(hp.shuffle_shards, ranks, min(hp.accumulation_steps, hp.batch_size))
    decode, augment = import_own_loading(hp)
    bad, crop = BadSamples(hp.bad_samples), "none" if augment else hp.augment
    options: dict[str, Any] = {"size": side, "share": share, "crop": crop, "seed": hp.seed, "classes": classes}
    in_train = [order for split, order in orders.items() if split != "test" or data.test is None]
    direct, loaders = dict[str, BatchSource](), dict[str, EncodedSamples]()
    targets = TargetSpec(np.dtype(np.int64), (), classes)
    for part, source, of in (("train", data.train, in_train), ("test", data.test, [orders["test"]])):
        if source is not None:
            if not decode:
                reader = open_image_reader(source, settings, streams)
                direct[part] = EncodedImages(reader, orders=of, bad=bad, threads=threads, device=device, **options)
            if decode or (augment and part == "train"):
                reader = open_image_reader(source, settings, streams, members=decode is not None)
                loaders[part] = EncodedSamples(reader, of, bad, decode=decode, augment=augment, **options)
    if decode:
        targets = loaders["train"].find_target_spec(orders["training"])
        for loader in loaders.values():
            loader.targets = targets
    pool = make_pool([*loaders.values()], threads)
    by_processes = {part: WorkerImages(loader, pool, device) for part, loader in loaders.items()}
    splits = make_splits(orders, direct, by_processes, InputSpec(3, side, side, data.mean, data.std), targets)
    if encoded_kind(hp.dataset) == "stream":
        assert isinstance(data.train, ShardIndex)
        assert isinstance(orders["training"], ShardOrder)
        shards = np.flatnonzero(orders["training"].available)  # without empty shards: a worker needs samples
        ours = replace(data.train, shards=[data.train.shards[number] for number in shards[rank() :: world_size()]])
        cache = ShardCache(settings.cache_folder, settings.cache_bytes)
        stream = RankStream(ours, cache, hp, rank(), workers=threads, size=side, share=share, classes=classes)
        samples = max(1, len(orders["training"]) // hp.batch_size) * hp.batch_size
        return replace(splits, training=Split(StreamImages(stream, device), StreamOrder(samples)))
    return splits


def open_encoded_test_split(
    data: EncodedSet,
    spec: InputSpec,
    classes: int,
    bad: BadSamples,
    *,
    sample: str = "",
    device: torch.device,
    settings: Settings,
) -> tuple[Split, Collection[int]]:
    """Open the test split of encoded images alone; return it, and the set of replaced samples, which grows as it loads.

    ``spec`` is the input, a square, of the model that gets the images; ``bad`` collects undecodable samples. With
    ``sample``, the hyperparameter, the user's code decodes the first sample here. Raises UserError for an empty split.
    """
    order = order_test_split(data)
    if not len(order):
        raise no_samples_error(data.name, "testing")
    threads = settings.loader_threads or count_cores()
    options: dict[str, Any] = {"size": spec.height, "share": spec.crop_share, "classes": classes}
    if sample:
        own: dict[str, Any] = {"decode": OwnFunction("sample", sample), "augment": None, "crop": "none", "seed": 0}
        reader = open_image_reader(data.test_source, settings, members=True)
        loader = EncodedSamples(reader, [order], bad, **own, **options)
        loader.targets = loader.find_target_spec(order)
        return Split(WorkerImages(loader, make_pool([loader], threads), device), order), loader.replaced
    reader = open_image_reader(data.test_source, settings)
    images = EncodedImages(reader, orders=[order], bad=bad, threads=threads, device=device, **options)
    return Split(images, order), images.replaced


def open_image_reader(
    source: ShardIndex | ImageList, settings: Settings, streams: int = 16, *, members: bool = False
) -> ImageReader:
    """Return a reader of image files, or of shards: of images and labels, or of all ``members``. Reads nothing yet."""
    if isinstance(source, ImageList):
        return (FileMembers if members else FileReader)(source)
    cache = ShardCache(settings.cache_folder, settings.cache_bytes)
    reader = ShardReader(source, cache, most_open=2 * streams, most_ahead=streams)
    return (ShardMembers if members else ShardImages)(reader)
