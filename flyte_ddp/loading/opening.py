"""Open the splits that a rank trains on, validates with and tests on."""

from collections.abc import Collection, Mapping
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
    no_samples_error,
    order_splits,
    order_test_split,
    order_training,
)
from flyte_ddp.hardware import Hardware
from flyte_ddp.loading.arrays import open_array_source
from flyte_ddp.loading.encoded import BadSamples, EncodedImages, ImageReader
from flyte_ddp.loading.opening_plain import open_plain_splits
from flyte_ddp.loading.own_encoded import EncodedSamples
from flyte_ddp.loading.own_images import ItemImages
from flyte_ddp.loading.own_items import ArrayItems
from flyte_ddp.loading.own_samples import OwnFunction, import_own_loading
from flyte_ddp.loading.readers import FileMembers, FileReader, ShardImages, ShardMembers
from flyte_ddp.loading.split import ImageSource, Split, Splits, TargetKind
from flyte_ddp.loading.streams import RankStream, StreamImages, StreamOrder
from flyte_ddp.loading.worker_sources import WorkerImages
from flyte_ddp.loading.workers import make_pool
from flyte_ddp.machine import count_cores
from flyte_ddp.models.images import EVALUATION_SHARE, InputSpec
from flyte_ddp.order.sampling import Order
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

    Copies arrays to the device if it is a GPU. Threads that decode encoded images, worker processes of a stream, and
    loader processes start at the first batch; :meth:`Splits.close` ends them. Without a process group this is rank 0
    of 1.
    """
    orders = order_splits(
        data, validation_fraction=hp.validation_fraction, seed=hp.seed, shuffle_shards=hp.shuffle_shards
    )
    orders["training"] = order_training(data, orders["training"], hp.sampling)
    threads = settings.loader_threads or hardware.threads
    if isinstance(data, ImageArrays):
        return open_array_splits(data, orders, hp, device, threads)
    if not isinstance(data, EncodedSet):
        return open_plain_splits(data, orders, hp, device, threads)
    return open_encoded_splits(data, orders, hp, device, threads=threads, settings=settings)


def open_encoded_splits(
    data: EncodedSet,
    orders: dict[str, SampleOrder],
    hp: Hyperparameters,
    device: torch.device,
    *,
    threads: int,
    settings: Settings,
) -> Splits:
    """Return the splits of shards, a stream or image files, decoded by ``threads`` threads, or as many processes.

    Processes decode what needs the user's own code. With ``sample``, decodes the first training sample here, to know
    the kind of the targets.
    """
    weights, classes = find_weights(hp.model, hp.init_from), len(data.classes) or hp.num_classes
    side = choose_side(hp.image_size, weights) or ENCODED_SIDE
    share = weights.crop_share if weights else EVALUATION_SHARE
    # The reader keeps two shards open for each shuffle stream, because all may change shards in the same step.
    streams = count_rank_streams(hp.shuffle_shards, world_size(), min(hp.accumulation_steps, hp.batch_size))
    decode, augment = import_own_loading(hp)
    bad, crop = BadSamples(hp.bad_samples), "none" if augment else hp.augment
    options: dict[str, Any] = {"size": side, "share": share, "crop": crop, "seed": hp.seed, "classes": classes}
    in_train = [order for split, order in orders.items() if split != "test" or data.test is None]
    sources: dict[str, ImageSource] = {}
    loaders: dict[str, EncodedSamples] = {}  # of what loader processes do
    for part, source, of in (("train", data.train, in_train), ("test", data.test, [orders["test"]])):
        if source is not None:
            if not decode:
                reader = open_image_reader(source, settings, streams)
                sources[part] = EncodedImages(reader, orders=of, bad=bad, threads=threads, device=device, **options)
            if decode or (augment and part == "train"):
                reader = open_image_reader(source, settings, streams, members=decode is not None)
                loaders[part] = EncodedSamples(reader, of, bad, decode=decode, augment=augment, **options)
    if loaders:
        pool = make_pool([*loaders.values()], threads)
        own: dict[str, ImageSource] = {part: WorkerImages(loader, pool, device) for part, loader in loaders.items()}
        targets = loaders["train"].find_kind_of_targets(orders["training"]) if decode else None
        for loader in loaders.values():
            loader.targets = targets or loader.targets
        sources = {**own, **sources}  # built-in decoding of what is not augmented stays in threads
        training = own["train"]
    else:
        targets, training = None, sources["train"]
    inputs = InputSpec(3, side, side, data.mean, data.std)
    tests = Split(sources.get("test", sources["train"]), orders["test"])
    validation = Split(sources["train"], orders["validation"])
    if encoded_kind(hp.dataset) == "stream":
        assert isinstance(data.train, ShardIndex)
        assert isinstance(orders["training"], ShardOrder)
        shards = np.flatnonzero(orders["training"].available)  # without empty shards: a worker needs samples
        ours = replace(data.train, shards=[data.train.shards[number] for number in shards[rank() :: world_size()]])
        cache = ShardCache(settings.cache_folder, settings.cache_bytes)
        stream = RankStream(ours, cache, hp, rank(), workers=threads, size=side, share=share, classes=classes)
        samples = max(1, len(orders["training"]) // hp.batch_size) * hp.batch_size
        return Splits(Split(StreamImages(stream, device), StreamOrder(samples)), validation, tests, inputs)
    return Splits(Split(training, orders["training"]), validation, tests, inputs, targets)


def open_array_splits(
    data: ImageArrays, orders: Mapping[str, Order], hp: Hyperparameters, device: torch.device, workers: int
) -> Splits:
    """Return the splits of arrays. With an ``augment`` of the user's own, ``workers`` processes load those to train on.

    Copies all arrays to the device if it is a GPU; with own augmentation too, as validation reads the training arrays.
    """
    _, own = import_own_loading(hp)
    images = open_array_source(device, data.train_images, data.train_labels, "none" if own else hp.augment, hp.seed)
    test_images = open_array_source(device, data.test_images, data.test_labels)
    _, height, width, channels = data.train_images.shape
    inputs = InputSpec(channels, height, width, data.mean, data.std)
    training, validation = (Split(images, orders[split]) for split in ("training", "validation"))
    if own:
        loader = ItemImages(
            ArrayItems(data.train_images, data.train_labels),
            data.name,
            size=data.train_images.shape[1:],
            targets=TargetKind(data.train_labels.dtype, data.train_labels.shape[1:], len(data.classes)),
            seed=hp.seed,
            augment=own,
            image_size=hp.image_size,
        )
        training = Split(WorkerImages(loader, make_pool([loader], workers), device), orders["training"])
    return Splits(training, validation, Split(test_images, orders["test"]), inputs)


def open_test_split(
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

    ``spec`` is the input of the model that gets the images, a square; ``bad`` collects undecodable samples. ``sample``
    is the hyperparameter of that name, with which the user's code decodes the first sample here. Decoding threads, or
    with ``sample`` loader processes, start at the first batch. Raises a UserError for an empty split, and the errors of
    decoding.
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
        loader.targets = loader.find_kind_of_targets(order)
        return Split(WorkerImages(loader, make_pool([loader], threads), device), order), loader.replaced
    reader = open_image_reader(data.test_source, settings)
    images = EncodedImages(reader, orders=[order], bad=bad, threads=threads, device=device, **options)
    return Split(images, order), images.replaced


def open_image_reader(
    source: ShardIndex | ImageList, settings: Settings, streams: int = 16, *, members: bool = False
) -> ImageReader:
    """Return a reader of a list of image files, or of shards: of images, or of all ``members``. Reads nothing yet.

    At most ``2 * streams`` shards stay open; at most ``streams`` are fetched ahead into the cache of ``settings``.
    """
    if isinstance(source, ImageList):
        return (FileMembers if members else FileReader)(source)
    cache = ShardCache(settings.cache_folder, settings.cache_bytes)
    reader = ShardReader(source, cache, most_open=2 * streams, most_ahead=streams)
    return (ShardMembers if members else ShardImages)(reader)
