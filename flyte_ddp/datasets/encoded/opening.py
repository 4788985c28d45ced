"""Open the splits of encoded images, and the threads or processes that load them."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import torch

from flyte_ddp.catalog import ENCODED_SIDE, choose_image_side, find_torchvision_weights
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.loading.loader_threads import ImagePool, LoaderThreads
from flyte_ddp.core.loading.split import Split, Splits
from flyte_ddp.core.loading.user_functions import Augmentation, UserFunction
from flyte_ddp.core.loading.worker_sources import WorkerImages
from flyte_ddp.core.loading.workers import POSSIBLE, start_loader_pool
from flyte_ddp.core.machine.resources import count_cores
from flyte_ddp.core.models.inputs import InputSpec, ModelInput
from flyte_ddp.core.models.sidecar import EVALUATION_SHARE
from flyte_ddp.core.order.shard_order import Orders, count_streams_per_rank
from flyte_ddp.core.parallel.distributed import world_size
from flyte_ddp.core.samples.pictures import Pixels
from flyte_ddp.core.settings import Settings
from flyte_ddp.datasets.encoded.decoding import DecodingError, decode_image
from flyte_ddp.datasets.encoded.encoded_set import EncodedSet
from flyte_ddp.datasets.encoded.readers import Encoded, map_samples
from flyte_ddp.datasets.encoded.samples import BadSamples, EncodedSamples
from flyte_ddp.datasets.prepared_set import Opening


def sample_options(data: EncodedSet, hp: Hyperparameters) -> dict[str, Any]:
    """Return the arguments of EncodedSamples in a training. Imports a user-defined ``sample`` function.

    Raises:
        UserError: The import fails.
    """
    weights = find_torchvision_weights(hp.model, hp.init_from)
    return {
        "size": choose_image_side(hp.image_size, weights) or ENCODED_SIDE,
        "evaluation_crop_fraction": weights.crop_share if weights else EVALUATION_SHARE,
        "seed": hp.seed,
        "classes": len(data.classes) or hp.num_classes,
        "decode": UserFunction.import_if_named("sample", hp.sample),
    }


def open_splits(
    data: EncodedSet, orders: Orders, hp: Hyperparameters, device: torch.device, settings: Settings
) -> Splits:
    """Open this rank's splits of encoded images.

    Imports the user's functions, and starts ``settings.loaders`` threads or processes that load samples. With a
    user-defined function ``sample``, a sample is decoded here.

    Raises:
        UserError: User code cannot be imported, or a sample that is decoded here is unfit.
        UserCodeError: User code fails on the sample that is decoded here.
    """
    # The reader keeps two shards open for each shuffle stream, because all may change shards in the same step.
    ranks = 1 if hp.mixup else world_size()  # a sample's partner may be any other sample of the global batch
    streams = count_streams_per_rank(hp.shuffle_shards, ranks, min(hp.accumulation_steps, hp.batch_size))
    options, augmentation = sample_options(data, hp), Augmentation.from_augment_setting(hp.augment, hp.seed)
    bad, members = BadSamples(hp.bad_samples), options["decode"] is not None
    in_train = [order for split, order in orders.items() if split != "test" or data.test is None]
    reader = data.open_reader(data.train, settings, streams, members=members)
    loaders = [EncodedSamples(reader, in_train, bad, **options, augmentation=augmentation)]
    targets = loaders[0].targets
    if data.test is not None:
        reader = data.open_reader(data.test, settings, streams, members=members)
        loaders.append(EncodedSamples(reader, [orders["test"]], bad, **options, trained_spec=targets))
    pool = start_pool(loaders, settings.loaders, device)
    sources = [WorkerImages(loader, pool, device) for loader in loaders]
    training, validation, test = (
        Split(sources[place], orders[split], loaders[place].reader.prefetcher)
        for split, place in (("training", 0), ("validation", 0), ("test", -1))
    )
    inputs = InputSpec(3, options["size"], options["size"], data.mean, data.std)
    return Splits(training, validation, test, inputs, targets)


def open_test_split(data: EncodedSet, opening: Opening) -> tuple[Split, ModelInput]:
    """Open the test split of encoded images for a trained model, whose input decides the size of the images.

    Raises:
        UserError: The test split is empty, or the user's function cannot be imported.
    """
    order, spec = data.make_test_order(), opening.spec
    assert isinstance(spec, InputSpec)  # others are rejected before
    if not len(order):
        raise data.no_samples_error("testing")
    reader = data.open_reader(data.test_source, opening.settings, members=bool(opening.sample))
    loader = EncodedSamples(
        reader,
        [order],
        opening.bad or BadSamples(0),
        size=spec.height,
        evaluation_crop_fraction=spec.crop_share,
        classes=opening.classes,
        decode=UserFunction("sample", opening.sample) if opening.sample else None,
    )
    pool = start_pool([loader], opening.settings.loaders or count_cores(), opening.device)
    return Split(WorkerImages(loader, pool, opening.device), order, reader.prefetcher), spec


def iterate_test_images(data: EncodedSet, opening: Opening) -> Iterator[Pixels]:
    """Yield the test split's images in RGB, neither cropped nor resized. Skips images that cannot be decoded.

    Starts threads, which decode up to twice as many images ahead as there are threads.
    """

    def decode_or_none(_: int, found: Encoded) -> Pixels | None:
        try:
            return decode_image(found.content)
        except DecodingError:
            return None

    order, threads = data.make_test_order(), opening.settings.loaders or count_cores()
    samples = order.samples_at(slice(0, len(order)))
    with closing(data.open_reader(data.test_source, opening.settings)) as images:
        decoded = map_samples(images, samples, threads, decode_or_none, 2 * threads)  # few ahead: images may be large
        yield from (image for image in decoded if image is not None)


def start_pool(loaders: Sequence[EncodedSamples], number: int, device: torch.device) -> ImagePool | None:
    """Start ``number`` processes or threads that load samples.

    Returns:
        Processes for user code, and for a GPU on Linux. Otherwise threads. Outside Linux, None for user code, which
        then runs in the rank.
    """
    own = any(loader.decode or loader.augmentation.function for loader in loaders)
    if own or (POSSIBLE and device.type == "cuda"):  # threads would keep the rank from starting the GPU's work
        return start_loader_pool(loaders, number)
    return LoaderThreads(number)
