"""Open the splits that a rank trains on, validates with and tests on."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from flyte_ddp.catalog import ENCODED_SIDE, choose_side, find_weights
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.encoded_set import EncodedSet
from flyte_ddp.datasets.image_folder import ImageList
from flyte_ddp.datasets.prepared import (
    ItemSet,
    PreparedSet,
    SampleOrder,
    no_samples_error,
    order_splits,
    order_test_split,
    order_training,
)
from flyte_ddp.datasets.sample_arrays import SampleArrays
from flyte_ddp.errors import UserError
from flyte_ddp.hardware import Hardware
from flyte_ddp.loading.arrays import open_array_batches
from flyte_ddp.loading.collate import PADDED
from flyte_ddp.loading.encoded import BadSamples, FileReader, ImageReader, ShardImages
from flyte_ddp.loading.encoded_samples import EncodedSamples
from flyte_ddp.loading.items import ItemFacts, ItemImages, ItemLoader, Items, describe_items
from flyte_ddp.loading.samples import UserFunction, import_user_functions
from flyte_ddp.loading.split import BatchSource, Split, Splits
from flyte_ddp.loading.streams import RankStream, StreamImages, StreamOrder
from flyte_ddp.loading.worker_sources import ItemBatches, WorkerImages
from flyte_ddp.loading.workers import POSSIBLE, ImagePool, LoaderThreads, make_pool
from flyte_ddp.machine.resources import count_cores
from flyte_ddp.models.inputs import InputSpec, LeavesSpec, ModelInput
from flyte_ddp.models.sidecar import EVALUATION_SHARE
from flyte_ddp.order.sampling import Order
from flyte_ddp.order.shard_order import ShardOrder, count_rank_streams
from flyte_ddp.parallel.distributed import rank, world_size
from flyte_ddp.settings import Settings
from flyte_ddp.shards.cache import ShardCache
from flyte_ddp.shards.dataset import ShardReader
from flyte_ddp.shards.index import ShardIndex


def open_splits(
    data: PreparedSet, hp: Hyperparameters, hardware: Hardware, device: torch.device, settings: Settings
) -> Splits:
    """Open this rank's splits, and start threads or processes that load samples.

    The result's ``close`` ends these threads or processes. Their number is ``settings.loaders``. If this is 0, each
    core of the rank has a thread or process, except one core for the rank itself with a GPU.

    Raises:
        UserError: Data and hyperparameters do not fit together, or user code cannot be imported.
        UserCodeError: User code fails on a sample that is read here.
    """
    orders = order_splits(data, hp)
    orders["training"] = order_training(data, orders["training"], hp.sampling)
    # With a GPU, one core is left for the rank's thread, which starts the GPU's work.
    threads = settings.loaders or max(1, hardware.threads - (device.type == "cuda"))
    if isinstance(data, EncodedSet):
        return open_encoded_splits(data, orders, hp, device, threads=threads, settings=settings)
    return open_item_splits(data, orders, hp, device, threads)


def open_encoded_splits(
    data: EncodedSet,
    orders: dict[str, SampleOrder],
    hp: Hyperparameters,
    device: torch.device,
    *,
    threads: int,
    settings: Settings,
) -> Splits:
    """Open this rank's splits of encoded images.

    Imports the user's functions, and starts ``threads`` threads or processes that load samples. With the user's
    function ``sample``, a sample is decoded here. The worker processes of a stream start at its first batch.

    Raises:
        UserError: User code cannot be imported, or a sample that is decoded here is unfit.
        UserCodeError: User code fails on the sample that is decoded here.
    """
    weights, classes = find_weights(hp.model, hp.init_from), len(data.classes) or hp.num_classes
    size = choose_side(hp.image_size, weights) or ENCODED_SIDE
    fraction = weights.crop_share if weights else EVALUATION_SHARE
    # The reader keeps two shards open for each shuffle stream, because all may change shards in the same step.
    ranks = 1 if hp.mixup else world_size()  # a sample's partner may be any other sample of the global batch
    shuffle_streams = count_rank_streams(hp.shuffle_shards, ranks, min(hp.accumulation_steps, hp.batch_size))
    decode, augment = import_user_functions(hp)
    options: dict[str, Any] = {
        "size": size,
        "evaluation_crop_fraction": fraction,
        "seed": hp.seed,
        "classes": classes,
        "decode": decode,
    }
    bad, members = BadSamples(hp.bad_samples), decode is not None
    in_train = [order for split, order in orders.items() if split != "test" or data.test is None]
    reader = open_image_reader(data.train, settings, shuffle_streams, members=members)
    crop = "none" if augment else hp.augment
    loaders = [EncodedSamples(reader, in_train, bad, **options, augment=augment, crop=crop)]
    targets = loaders[0].targets
    if data.test is not None:
        reader = open_image_reader(data.test, settings, shuffle_streams, members=members)
        loaders.append(EncodedSamples(reader, [orders["test"]], bad, **options, trained_spec=targets))
    pool = start_pool(loaders, threads, device)
    sources = [WorkerImages(loader, pool, device) for loader in loaders]
    training, validation = (Split(sources[0], orders[split]) for split in ("training", "validation"))
    if data.is_stream:
        assert isinstance(data.train, ShardIndex)
        assert isinstance(orders["training"], ShardOrder)
        shards = np.flatnonzero(orders["training"].available)  # without empty shards: a worker needs samples
        ours = replace(data.train, shards=[data.train.shards[number] for number in shards[rank() :: world_size()]])
        shard_reader = ShardReader(ours, ShardCache(settings.cache_folder, settings.cache_bytes), most_open=1)
        loader = EncodedSamples(ShardImages(shard_reader), [], BadSamples(hp.bad_samples), **options, crop=hp.augment)
        stream = RankStream(shard_reader, loader, rank(), threads, hp.shuffle_buffer)
        samples = max(1, len(orders["training"]) // hp.batch_size) * hp.batch_size
        training = Split(StreamImages(stream, device), StreamOrder(samples))
    inputs = InputSpec(3, size, size, data.mean, data.std)
    return Splits(training, validation, Split(sources[-1], orders["test"]), inputs, targets)


def open_encoded_test_split(
    data: EncodedSet,
    spec: InputSpec,
    classes: int,
    bad: BadSamples,
    *,
    sample: str = "",
    device: torch.device,
    settings: Settings,
) -> tuple[Split, EncodedSamples]:
    """Open the test split of encoded images, and start threads or processes that load samples.

    Args:
        spec: The input of the trained model, which decides the size of the images.
        classes: Number of classes, 0 if user code makes the targets.
        bad: Collects the samples that cannot be decoded.
        sample: Name of the user's function that decodes samples, or "".
        settings: The number of loaders (0: one for each core), and the shards' cache.

    Returns:
        The split, and its loader, whose ``replaced`` lists damaged samples.

    Raises:
        UserError: The test split is empty, or the user's function cannot be imported.
    """
    order = order_test_split(data)
    if not len(order):
        raise no_samples_error(data.name, "testing")
    reader = open_image_reader(data.test_source, settings, members=bool(sample))
    decode = UserFunction("sample", sample) if sample else None
    loader = EncodedSamples(
        reader, [order], bad, size=spec.height, evaluation_crop_fraction=spec.crop_share, classes=classes, decode=decode
    )
    pool = start_pool([loader], settings.loaders or count_cores(), device)
    return Split(WorkerImages(loader, pool, device), order), loader


def start_pool(loaders: Sequence[EncodedSamples], number: int, device: torch.device) -> ImagePool | None:
    """Start ``number`` processes or threads that load samples.

    Returns:
        Processes for user code, and for a GPU on Linux. Otherwise threads. Outside Linux, None for user code, which
        then runs in the rank.
    """
    own = any(loader.decode or loader.augment for loader in loaders)
    if own or (POSSIBLE and device.type == "cuda"):  # threads would keep the rank from starting the GPU's work
        return make_pool(loaders, number)
    return LoaderThreads(number)


def open_image_reader(
    source: ShardIndex | ImageList, settings: Settings, shuffle_streams: int = 16, *, members: bool = False
) -> ImageReader:
    """Return a reader of image files or shards. Nothing is read yet.

    The reader keeps two shards open for each of ``shuffle_streams``, and downloads one ahead. With ``members``, the
    reader returns the files of a sample in place of image and label.
    """
    if isinstance(source, ImageList):
        return FileReader(source, members=members)
    cache = ShardCache(settings.cache_folder, settings.cache_bytes)
    reader = ShardReader(source, cache, most_open=2 * shuffle_streams, most_ahead=shuffle_streams)
    return ShardImages(reader, members=members)


def open_item_splits(
    data: ItemSet, orders: Mapping[str, Order], hp: Hyperparameters, device: torch.device, workers: int
) -> Splits:
    """Open this rank's splits of arrays or of a data set on demand.

    If items, augmentation or collate are user-defined, starts ``workers`` processes (on Linux). Without user code,
    starts no process. If items or collate are user-defined, first reads up to 16 samples in this process.

    Raises:
        UserError: ``mixup`` cannot mix the inputs, samples do not fit together, or user code cannot be imported.
        UserCodeError: User code fails on a sample that is read here.
    """
    _, augment = import_user_functions(hp)
    facts = describe_items(data, "train", orders["training"], hp.collate, hp.seed, classes=hp.num_classes)
    if hp.mixup and isinstance(facts.inputs, LeavesSpec):
        mixed = all(leaf.dtype == "float" and None not in leaf.shape for _, leaf in facts.inputs.leaves)
        if hp.collate == PADDED or not mixed:
            inputs = facts.inputs.describe() + (", padded" if hp.collate == PADDED else "")
            rule = "only floats of one shape can be mixed"
            raise UserError(f"mixup={hp.mixup:g}: the inputs are {inputs}, and {rule}; set mixup=0")
    crop = "none" if augment else hp.augment
    options: dict[str, Any] = {"collate": hp.collate, "seed": hp.seed, "crop": crop, "image_size": hp.image_size}
    direct, by_processes = open_sources(data, {"train": augment, "test": None}, facts, device, workers, **options)
    # With a user-defined augmentation, "train" is in both: by processes for training, direct for validation.
    sources = {**by_processes, **direct}
    training = Split(by_processes.get("train", sources["train"]), orders["training"])
    validation, test = Split(sources["train"], orders["validation"]), Split(sources["test"], orders["test"])
    return Splits(training, validation, test, facts.inputs, facts.targets)


def open_item_test_split(
    data: ItemSet,
    collate: str,
    seed: int,
    device: torch.device,
    workers: int,
    *,
    trained_spec: LeavesSpec | None = None,
) -> tuple[Split, ModelInput]:
    """Open the test split of arrays or of a data set on demand.

    If items or collate are user-defined, starts ``workers`` processes (on Linux), and first reads up to 16 samples in
    this process.

    Args:
        collate: The hyperparameter of the trained model.
        trained_spec: The inputs of the trained model. They decide the order of the inputs and the types in batches.

    Returns:
        The split, and the specification of its inputs.

    Raises:
        UserError: Samples do not fit together.
        UserCodeError: User code fails on a sample that is read here.
    """
    order = order_test_split(data)
    facts = describe_items(data, "test", order, collate, seed, trained_spec=trained_spec)
    direct, by_processes = open_sources(data, {"test": None}, facts, device, workers, collate=collate, seed=seed)
    return Split((direct or by_processes)["test"], order), facts.inputs


def open_sources(
    data: ItemSet,
    sides: Mapping[str, UserFunction | None],  # by side: the user-defined augmentation
    facts: ItemFacts,
    device: torch.device,
    workers: int,
    *,
    collate: str,
    seed: int,
    crop: str = "none",
    image_size: int = 0,
) -> tuple[dict[str, BatchSource], dict[str, BatchSource]]:
    """Open the sources of batches of each side, and start processes for user code.

    Args:
        sides: The sides to open, "train" or "test", each with its user-defined augmentation or None.
        crop: The built-in augmentation of images: "none", "crop" or "crop_flip".
        image_size: Side of the images that a user-defined augmentation may return, or 0.

    Returns:
        Two dicts by side: the sources of arrays, and the sources whose processes run user code. A side of arrays with a
        user-defined augmentation is in both.
    """
    direct, loaders = dict[str, BatchSource](), dict[str, ItemImages | ItemLoader]()
    for side, augment in sides.items():
        if isinstance(data, SampleArrays) and ":" not in collate:
            direct[side] = open_array_batches(device, data, side, masked=facts.masked, augment=crop, seed=seed)
            if augment is None:
                continue
        items, spec = Items(data, side), facts.inputs
        if isinstance(spec, InputSpec):
            assert facts.targets is not None
            loaders[side] = ItemImages(items, spec, facts.targets, seed, augment=augment, image_size=image_size)
        else:
            loaders[side] = ItemLoader(items, collate, seed, augment=augment, masked=facts.masked, types=facts.types)
    pool = make_pool([*loaders.values()], workers)
    by_processes: dict[str, BatchSource] = {
        side: WorkerImages(loader, pool, device, crop, seed)
        if isinstance(loader, ItemImages)
        else ItemBatches(loader, pool, device)
        for side, loader in loaders.items()
    }
    return direct, by_processes
