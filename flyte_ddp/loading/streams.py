"""Training without epochs, on shards that are read from their beginning to their end: webdataset's way.

Shards are dealt to ranks and to the workers of each, which go through theirs again and again, every time in another
order, mix samples in a buffer and make small batches of them; what all workers give is taken apart and mixed once more.
Which samples a step sees depends on the numbers of ranks and workers, and on where a run was cut off: streams are the
one exemption from the global order. Each rank gets as many samples in a step as with any other data set, so DDP cannot
hang.
"""

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
from flyte_ddp.device_copy import copy_to_device
from flyte_ddp.errors import UserError
from flyte_ddp.loading import cropping
from flyte_ddp.loading.decoding import DecodingError, Pixels
from flyte_ddp.loading.encoded import BadSamples, Encoded, decode_and_check
from flyte_ddp.loading.shards import ShardImages
from flyte_ddp.loading.split import Batch, Images
from flyte_ddp.lookahead import start_ahead
from flyte_ddp.order import sampling
from flyte_ddp.order.sampling import Indices
from flyte_ddp.process import die_with_parent
from flyte_ddp.shards.cache import ShardCache
from flyte_ddp.shards.dataset import ShardReader
from flyte_ddp.shards.index import ShardIndex

WORKER_BATCH = 16  # samples that a worker hands over at a time: one at a time is slow


@dataclass(frozen=True)
class StreamOrder(sampling.Order):
    """Numbers of samples in the order in which they come; which samples these are is not known beforehand."""

    total: int  # samples of what counts as an epoch, a whole number of batches

    def __len__(self) -> int:
        return self.total

    def samples(self, place: slice) -> Indices:
        """Return the numbers themselves."""
        return np.arange(place.start, place.stop)

    def batches(self, epoch: int, batch_size: int, first: int = 0) -> Iterator[Indices]:
        """Yield so many numbers for each step, from step ``first`` of the epoch on."""
        for start in range(epoch * self.total + first * batch_size, (epoch + 1) * self.total, batch_size):
            yield np.arange(start, start + batch_size)


@dataclass(frozen=True, eq=False)
class RankStream:
    """What a rank's stream is made of."""

    index: ShardIndex  # the shards of this rank
    cache: ShardCache
    hp: Hyperparameters  # with ``shuffle_buffer``, ``augment``, ``seed`` and ``bad_samples``
    rank: int
    workers: int  # processes that read and decode
    size: int  # side of the images, in pixels
    classes: int
    start: int = 0  # the number of the first sample, by which the orders differ, too

    def seed(self, purpose: int) -> int:
        """Return a seed that differs for ranks, for the places that runs begin at, and for purposes."""
        words = [self.hp.seed, self.rank, self.start, purpose]
        return int(np.random.SeedSequence(words).generate_state(1)[0])


class StreamImages(Images):
    """Hands out a rank's share of each batch, as it comes; workers look ahead themselves."""

    def __init__(self, stream: RankStream, device: torch.device) -> None:
        self.stream, self.device = stream, device
        self.samples: Iterator[tuple[Pixels, int]] | None = None
        self.last: tuple[bytes, Batch] | None = None

    def gather(self, samples: Indices, epoch: int | None) -> Batch:  # noqa: ARG002
        """Return the next images uint8 [n, size, size, 3] and labels; the same ones for the same numbers again."""
        key = samples.tobytes()
        if self.last is None or self.last[0] != key:
            if self.samples is None:
                # A resumed run gets another order than one that starts from scratch.
                self.samples = remixed(replace(self.stream, start=int(samples[0]) if len(samples) else 0))
            images = torch.empty(len(samples), self.stream.size, self.stream.size, 3, dtype=torch.uint8)
            labels = torch.empty(len(samples), dtype=torch.int64)
            try:
                for place in range(len(samples)):
                    pixels, labels[place] = next(self.samples)
                    images[place] = torch.from_numpy(pixels)
            except BaseException as error:
                # The traceback's frames hold the DataLoader. Its workers, and the semaphores that they share with this
                # process, end with it, and this process may end by os._exit, which takes nothing down.
                traceback.clear_frames(error.__traceback__)
                self.samples = None
                raise
            self.last = (key, Batch(copy_to_device(images, self.device), copy_to_device(labels, self.device)))
        return self.last[1]

    def close(self) -> None:
        """End the workers."""
        self.samples = self.last = None


def remixed(stream: RankStream) -> Iterator[tuple[Pixels, int]]:
    """Return the samples of all workers of a rank, mixed: images uint8 [size, size, 3] and labels."""
    import webdataset as wds

    loader = wds.WebLoader(
        worker_pipeline(stream),
        batch_size=None,
        collate_fn=keep_batch,
        num_workers=stream.workers,
        multiprocessing_context="spawn" if stream.workers else None,
        persistent_workers=bool(stream.workers),
        worker_init_fn=prepare_worker,
        generator=torch.Generator().manual_seed(stream.hp.seed),  # else it draws from the model's random numbers
    )
    mixed = loader.compose(
        raise_error,
        wds.filters.unbatched(),
        wds.filters.shuffle(stream.hp.shuffle_buffer, seed=stream.seed(0)),
    ).repeat()
    return iter(mixed)


def keep_batch(batch: Any) -> Any:
    """Return a worker's batch as it is, of NumPy arrays, which go through a pipe.

    A DataLoader would make tensors of them, which go through ``/dev/shm``. Where that is full, as soon in a container
    that has the usual 64 MB, a batch is lost and the rank waits for it for ever.
    """
    return batch


def prepare_worker(_: int) -> None:
    """Let the worker end with its rank, and leave Ctrl-C to the launcher."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def worker_pipeline(stream: RankStream) -> Any:
    """Return what each worker does: read its shards, for ever, and make small batches of their samples."""
    import webdataset as wds

    buffer = stream.hp.shuffle_buffer
    reader = ShardImages(ShardReader(stream.index, stream.cache, most_open=1))
    return wds.DataPipeline(
        partial(passes_of, stream),
        partial(samples_of, reader),
        wds.filters.shuffle(buffer, initial=min(100, buffer), seed=stream.seed(1)),
        partial(images_of, stream, reader),
        wds.filters.batched(WORKER_BATCH, partial=False),
        yield_error,
    )


def passes_of(stream: RankStream) -> Iterator[tuple[int, int]]:
    """Yield the number of the pass and that of a shard: a worker's shards, pass after pass, in another order each."""
    number, workers = own_worker()
    own = range(number, len(stream.index.shards), workers)
    passes = 0
    while own:
        order = sampling.random_stream(sampling.ORDER, stream.seed(2), passes, number)
        for place in order.permutation(len(own)).tolist():
            yield passes, own[place]
        passes += 1


def samples_of(reader: ShardImages, shards: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, Encoded]]:
    """Yield pass, number and stored sample of each shard from its beginning to its end, while the next is fetched."""
    index = reader.reader.index

    def prefetch(item: tuple[int, int]) -> tuple[int, int]:
        reader.reader.prefetch([item[1]])
        return item

    for passes, shard in start_ahead(prefetch, shards, 1):
        end = int(index.ends[shard])
        for sample in range(end - index.shards[shard].samples, end):
            yield passes, sample, reader.read(sample)


def images_of(
    stream: RankStream, reader: ShardImages, samples: Iterable[tuple[int, int, Encoded]]
) -> Iterator[tuple[Pixels, int]]:
    """Decode and crop samples; yield images uint8 [size, size, 3] and labels.

    Leaves out samples that cannot be decoded, and counts them as bad. Raises a UserError for one too many, if none of a
    whole pass can be decoded, and for a label that is no class's number.
    """
    bad, in_a_row = BadSamples(stream.hp.bad_samples), 0
    number, workers = own_worker()
    most = int(stream.index.counts[number::workers].sum()) + stream.hp.shuffle_buffer  # all of them have come by then
    for passes, sample, found in samples:
        try:
            pixels, label = decode_and_check(reader, sample, found, stream.classes)
        except DecodingError as error:
            bad.add(found.name, str(error))
            in_a_row += 1
            if in_a_row > most:
                raise UserError(f"{found.name}: no sample of its worker can be decoded ({error})") from None
            continue
        in_a_row, draws = 0, None
        if stream.hp.augment == "resized_crop":
            [draws] = cropping.draw(stream.hp.seed, passes, np.array([zlib.crc32(found.name.encode())]))
        yield np.ascontiguousarray(cropping.squared(pixels, stream.size, draws)), label


def yield_error(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield batches, and a UserError at their end as a value: a DataLoader would make pages of the exception."""
    try:
        yield from batches
    except UserError as error:
        yield error


def raise_error(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield batches, and raise the UserError that comes after them."""
    for batch in batches:
        if isinstance(batch, UserError):
            raise batch
        yield batch


def own_worker() -> tuple[int, int]:
    """Return which worker this process is, and of how many; the rank's own process is the only one of one."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)
