"""Train without epochs on shards that are read sequentially, as webdataset does.

Each worker process of a rank reads its shards again and again, in a new order each time, and shuffles samples in a
buffer. The rank shuffles the workers' samples again. The samples of a step depend on the numbers of ranks and workers,
and on the step at which a run resumed. Streams are the only exception from the global order. Each rank gets as many
samples in a step as with other data sets, so DDP cannot hang.
"""

import itertools
import multiprocessing
import signal
import traceback
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.loading.split import Batch, BatchSource, CheckTargets, Split, Splits
from flyte_ddp.core.loading.user_functions import Augmentation
from flyte_ddp.core.lookahead import start_ahead
from flyte_ddp.core.machine import process
from flyte_ddp.core.machine.device_copy import copy_to_device
from flyte_ddp.core.machine.waiting import limit_wait
from flyte_ddp.core.order.sampling import ORDER, Indices, Order, make_generator
from flyte_ddp.core.order.shard_order import Orders, ShardOrder
from flyte_ddp.core.parallel.distributed import rank, world_size
from flyte_ddp.core.samples.pictures import Pixels
from flyte_ddp.core.settings import Settings
from flyte_ddp.datasets.encoded import cropping, opening
from flyte_ddp.datasets.encoded.opening import iterate_test_images, open_test_split, sample_options
from flyte_ddp.datasets.encoded.readers import Encoded, ShardImages
from flyte_ddp.datasets.encoded.samples import BadSamples, EncodedSamples
from flyte_ddp.datasets.encoded.shard_set import ShardSet
from flyte_ddp.shards.cache import ShardCache
from flyte_ddp.shards.dataset import ShardReader

__all__ = ["iterate_test_images", "open_splits", "open_test_split"]  # the functions that open a StreamSet
WORKER_BATCH = 16  # samples that a worker sends at a time: one at a time is slow


@dataclass(frozen=True)
class StreamOrder(Order):
    """Consecutive numbers in place of samples, because a stream's next sample is not known beforehand."""

    total: int  # samples that count as an epoch, a multiple of the global batch

    def __len__(self) -> int:
        return self.total

    def samples_at(self, place: slice) -> Indices:
        return np.arange(place.start, place.stop)

    def batches(self, epoch: int, batch_size: int, first: int = 0) -> Iterator[Indices]:
        """Yield consecutive numbers that no other epoch has, in place of the samples of each global batch."""
        for start in range(epoch * self.total + first * batch_size, (epoch + 1) * self.total, batch_size):
            yield np.arange(start, start + batch_size)


@dataclass(frozen=True, eq=False)
class RankStream:
    """The settings of a rank's stream, which are sent to the worker processes."""

    reader: ShardReader  # of this rank's shards
    loader: EncodedSamples  # decodes the samples of these shards
    rank: int
    workers: int  # processes that read and decode
    shuffle_buffer: int
    start: int = 0  # number of the run's first sample, so a resumed run draws another order

    def derive_seed(self, purpose: int) -> int:
        words = [self.loader.seed, self.rank, self.start, purpose]
        return int(np.random.SeedSequence(words).generate_state(1)[0])


class StreamImages(BatchSource):
    """Source of batches of a rank's stream, in the order of the stream. Workers start at the first batch."""

    def __init__(self, stream: RankStream, device: torch.device) -> None:
        self.stream, self.device, self.loaders = stream, device, stream.workers
        self.samples: Iterator[tuple[Pixels, int]] | None = None  # the rank's stream, once it has begun
        self.last: tuple[bytes, Batch] | None = None  # the last batch, with the bytes of its numbers

    def load_batch(  # the targets are class numbers, which each worker has checked
        self,
        samples: Indices,
        epoch: int | None,  # noqa: ARG002
        check_targets: CheckTargets | None = None,  # noqa: ARG002  # each worker checks the class numbers
    ) -> Batch:
        """Return the stream's next ``len(samples)`` images uint8 [n, size, size, 3] and labels, on the device.

        The numbers in ``samples`` do not choose the images. A call with the ``samples`` of the last call returns the
        last batch again. The first call starts the workers. ``samples[0]`` of the first call seeds the shuffling, so a
        resumed run gets another order. Any error ends the workers. ``epoch`` and ``check_targets`` are ignored, because
        the workers check the labels.

        Raises:
            UserError: A worker has raised UserError.
            MachineError: The batch did not arrive within FLYTE_DDP_TIMEOUT.
        """
        key = samples.tobytes()
        if self.last is None or self.last[0] != key:
            if self.samples is None:
                # With the first number as start, a resumed run does not repeat the order of the beginning.
                self.samples = open_sample_stream(replace(self.stream, start=int(samples[0]) if len(samples) else 0))
            images = torch.empty(len(samples), *self.stream.loader.sizes[0], dtype=torch.uint8)
            labels = torch.empty(len(samples), dtype=torch.int64)
            try:
                with limit_wait("a batch of the stream"):
                    for place in range(len(samples)):
                        pixels, labels[place] = next(self.samples)
                        images[place] = torch.from_numpy(pixels)
            except BaseException as error:
                # Release the DataLoader, which the traceback's frames hold. Only then the workers end, and their shared
                # semaphores are removed. This process may end by os._exit, which releases nothing.
                traceback.clear_frames(error.__traceback__)
                self.samples = None
                raise
            self.last = (key, Batch(copy_to_device(images, self.device), copy_to_device(labels, self.device)))
        return self.last[1]

    def close(self) -> None:
        self.samples = self.last = None


def open_sample_stream(stream: RankStream) -> Iterator[tuple[Pixels, int]]:
    """Return an endless iterator of shuffled images uint8 [size, size, 3] and labels.

    The first use of the iterator starts the workers. A UserError of a worker is raised by the iterator.
    """
    import webdataset as wds

    def raise_forwarded_error(batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            if isinstance(batch, UserError):
                raise batch
            yield batch

    buffer = stream.shuffle_buffer
    worker_pipeline = wds.DataPipeline(
        partial(order_worker_shards, stream),
        partial(read_shard_samples, stream),
        wds.filters.shuffle(buffer, initial=min(100, buffer), seed=stream.derive_seed(1)),
        partial(decode_and_crop, stream),
        wds.filters.batched(WORKER_BATCH, partial=False),
        forward_error_as_value,
    )
    loader = wds.WebLoader(
        worker_pipeline,
        batch_size=None,
        collate_fn=return_batch_unchanged,
        num_workers=stream.workers,
        multiprocessing_context="spawn" if stream.workers else None,
        persistent_workers=bool(stream.workers),
        worker_init_fn=prepare_worker,
        # By default a DataLoader draws from torch's global generator, which the model uses.
        generator=torch.Generator().manual_seed(stream.loader.seed),
    )
    mixed = loader.compose(
        raise_forwarded_error, wds.filters.unbatched(), wds.filters.shuffle(buffer, seed=stream.derive_seed(0))
    )
    return iter(mixed.repeat())


def return_batch_unchanged(batch: Any) -> Any:
    """Return a worker's batch unchanged, as NumPy arrays, which are sent through a pipe."""
    # By default a DataLoader sends tensors by /dev/shm. If /dev/shm is full (64 MB), a rank waits for a batch forever.
    return batch


def prepare_worker(_: int) -> None:
    process.die_with_parent()
    process.ignore_signals((signal.SIGINT, signal.SIGHUP))
    multiprocessing.current_process().daemon = False  # so that user code may start processes by multiprocessing


def order_worker_shards(stream: RankStream) -> Iterator[tuple[int, int]]:
    """Yield (pass, shard) without end, or nothing if this worker has no shards.

    Each pass has all of this worker's shards, in a new order. Passes count from 0.
    """
    number, workers = worker_number_and_count()
    shards = range(number, len(stream.reader.index.shards), workers)
    for passes in itertools.count() if shards else ():
        generator = make_generator(ORDER, stream.derive_seed(2), passes, number)
        for shard in generator.permutation(shards).tolist():
            yield passes, shard


def read_shard_samples(stream: RankStream, shards: Iterable[tuple[int, int]]) -> Iterator[tuple[int, Encoded]]:
    """Yield (pass, encoded image) for each sample of the shards, in order, and fetch the next shard ahead."""
    index = stream.reader.index

    def start_fetch(item: tuple[int, int]) -> tuple[int, int]:
        stream.reader.prefetch_in_threads([item[1]])
        return item

    for passes, shard in start_ahead(start_fetch, shards, 1):
        end = int(index.ends[shard])
        for sample in range(end - index.shards[shard].samples, end):
            yield passes, stream.loader.reader.read_sample(sample)


def decode_and_crop(stream: RankStream, samples: Iterable[tuple[int, Encoded]]) -> Iterator[tuple[Pixels, int]]:
    """Yield the square image and the label of each sample. Runs in a worker.

    ``samples`` are pairs (pass, encoded image). Records samples that cannot be decoded in ``loader.bad``, and skips
    them.

    Raises:
        UserError: More samples are recorded than ``bad`` allows, or a label is out of range. Also raised if more
            samples in a row failed than the worker's shards and the shuffle buffer hold.
    """
    loader, failures_in_a_row = stream.loader, 0
    number, workers = worker_number_and_count()
    # A longer row of failures means that no sample of this worker is good.
    most = int(stream.reader.index.counts[number::workers].sum()) + stream.shuffle_buffer
    for passes, encoded in samples:
        if (loaded := loader.decode_or_record(0, encoded, None)) is None:
            failures_in_a_row += 1
            if failures_in_a_row > most:
                reason = loader.bad.names[encoded.name]
                raise UserError(f"{encoded.name}: no sample of this worker can be decoded ({reason})")
            continue
        (pixels, label), failures_in_a_row, draws = loaded, 0, None
        if loader.augmentation.kind == cropping.RESIZED_CROP:
            [draws] = cropping.draw_crops(
                loader.augmentation.seed, passes, np.array([zlib.crc32(encoded.name.encode())])
            )
        yield (
            np.ascontiguousarray(cropping.crop_to_square(pixels, loader.size, draws, loader.evaluation_crop_fraction)),
            label,
        )


def forward_error_as_value(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield batches. If a UserError is raised, yield the error as the last item.

    A DataLoader would add pages of traceback to a raised error.
    """
    try:
        yield from batches
    except UserError as error:
        yield error


def worker_number_and_count() -> tuple[int, int]:
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


def open_splits(
    data: ShardSet, orders: Orders, hp: Hyperparameters, device: torch.device, settings: Settings
) -> Splits:
    """Open this rank's splits. The ``settings.loaders`` processes of the training split start at its first batch.

    Empty shards are skipped. Imports a user-defined augmentation.

    Raises:
        UserError: There are fewer training shards than loaders of all ranks, or the import fails.
    """
    training = orders["training"]
    assert isinstance(training, ShardOrder)
    shards = np.flatnonzero(training.available)  # without empty shards: a worker needs samples
    ranks, workers = world_size(), settings.loaders
    if len(shards) < ranks * workers:
        problem = f"has {len(shards)} training shards for {ranks} ranks x {workers} workers: each worker needs one"
        fix = "make more shards, or lower num_ranks or FLYTE_DDP_LOADERS"
        raise UserError(f"dataset={data.name!r}: {problem}; {fix}")
    splits = opening.open_splits(data, orders, hp, device, settings)
    ours = replace(data.train, shards=[data.train.shards[number] for number in shards[rank() :: ranks]])
    reader = ShardReader(ours, ShardCache(settings.cache_folder, settings.cache_bytes), most_open=1)
    augmentation, bad = Augmentation.from_augment_setting(hp.augment, hp.seed), BadSamples(hp.bad_samples)
    loader = EncodedSamples(ShardImages(reader), [], bad, **sample_options(data, hp), augmentation=augmentation)
    samples = max(1, len(training) // hp.batch_size) * hp.batch_size
    stream = RankStream(reader, loader, rank(), workers, hp.shuffle_buffer)
    return replace(splits, training=Split(StreamImages(stream, device), StreamOrder(samples)))
