"""Training without epochs, on shards that are read from their beginning to their end: webdataset's way.

Shards are dealt to ranks and to the workers of each, which go through theirs again and again, every time in another
order, mix samples in a buffer and make small batches of them; what all workers give is taken apart and mixed once more.
Which samples a step sees depends on the numbers of ranks and workers, and on where a run was cut off: streams are the
one exemption from the global order. Each rank gets as many samples in a step as with any other data set, so DDP cannot
hang.
"""

from __future__ import annotations

import signal
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from flyte_ddp import sampling
from flyte_ddp.errors import UserError
from flyte_ddp.launch.rank_process import die_with_parent
from flyte_ddp.loading import cropping
from flyte_ddp.loading.decoding import DecodingError, Pixels, decode
from flyte_ddp.loading.encoded import BadSamples, Encoded, checked_label
from flyte_ddp.loading.facts import Facts
from flyte_ddp.loading.shards import encoded_sample
from flyte_ddp.sampling import Indices
from flyte_ddp.shards.cache import ShardCache
from flyte_ddp.shards.dataset import ShardReader
from flyte_ddp.shards.index import ShardIndex

WORKER_BATCH = 16  # samples that a worker hands over at a time: one at a time is slow


@dataclass(frozen=True)
class StreamOrder:
    """Numbers that stand for samples in the order of their coming: what they are, nobody knows beforehand.

    Args:
        total: samples of what counts as an epoch, a whole number of batches.
    """

    total: int

    def __len__(self) -> int:
        return self.total

    def samples(self, place: slice) -> Indices:
        """The numbers themselves."""
        return np.arange(place.start, place.stop)

    def batches(self, epoch: int, batch_size: int, first: int = 0) -> Iterator[Indices]:
        """So many numbers for each step."""
        for start in range(epoch * self.total + first * batch_size, (epoch + 1) * self.total, batch_size):
            yield np.arange(start, start + batch_size)

    def reach(self, batch_size: int, *, mixed: bool) -> int:  # noqa: ARG002
        """Workers look ahead themselves."""
        return 0


@dataclass(frozen=True, eq=False)
class RankStream:
    """What a rank's stream is made of.

    Args:
        index: the shards of this rank.
        cache: through which they are read.
        rank: whose stream it is.
        workers: processes that read and decode.
        buffer: samples that each worker, and the rank itself, mix among.
        size: side of the images, in pixels.
        crop: resized_crop or none.
        seed: of the orders, the mixing and the crops.
        classes: their number.
        bad_samples: how many samples each worker may leave out because they cannot be decoded.
        start: the number of the first sample, by which the orders differ, too.
    """

    index: ShardIndex
    cache: ShardCache
    rank: int
    workers: int
    buffer: int
    size: int
    crop: str
    seed: int
    classes: int
    bad_samples: int
    start: int = 0


class StreamImages:
    """Hands out a rank's share of each batch, as it comes."""

    batches_ahead = 0

    def __init__(self, options: RankStream, device: torch.device) -> None:
        self.options, self.device = options, device
        self.samples: Iterator[tuple[Tensor, Tensor]] | None = None
        self.last: tuple[bytes, tuple[Tensor, Tensor]] | None = None

    def gather(self, samples: Indices, epoch: int | None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """The next images uint8 [n, size, size, 3] and labels int64 [n] on the device; asked again, the same ones.

        Raises:
            UserError: a shard that cannot be had, or a sample that cannot be used.
        """
        key = samples.tobytes()
        if self.last is None or self.last[0] != key:
            if self.samples is None:
                # From another place in the run a run that goes on gets another order.
                self.samples = remixed(replace(self.options, start=int(samples[0]) if len(samples) else 0))
            found = [next(self.samples) for _ in range(len(samples))]
            images = torch.stack([image for image, _ in found]) if found else self.nothing()
            labels = torch.tensor([int(label) for _, label in found], dtype=torch.int64)
            self.last = (key, (images.to(self.device), labels.to(self.device)))
        return self.last[1]

    def nothing(self) -> Tensor:
        """The images of a rank that has no sample in a step."""
        return torch.empty(0, self.options.size, self.options.size, 3, dtype=torch.uint8)

    def names(self, samples: Indices) -> list[str]:  # noqa: ARG002
        """What comes is only trained on."""
        return []

    def prefetch(self, samples: Indices, epoch: int | None) -> None:
        """Workers are ahead anyway."""

    def expect(self, samples: Indices) -> None:
        """Likewise."""

    def facts(self) -> Facts:
        """Workers keep theirs to themselves."""
        return Facts()

    def close(self) -> None:
        """Ends the workers."""
        self.samples = None
        self.last = None


def remixed(options: RankStream) -> Iterator[tuple[Tensor, Tensor]]:
    """The samples of all workers of a rank, mixed: images uint8 [size, size, 3] and labels."""
    import webdataset as wds

    loader = wds.WebLoader(
        worker_pipeline(options),
        batch_size=None,
        num_workers=options.workers,
        multiprocessing_context="spawn" if options.workers else None,
        persistent_workers=bool(options.workers),
        worker_init_fn=begin_worker,
        generator=torch.Generator().manual_seed(options.seed),  # else it draws from the model's random numbers
    )
    mixed = loader.compose(
        raised,
        wds.filters.unbatched(),
        wds.filters.shuffle(options.buffer, seed=stream_seed(options, 0)),
    ).repeat()
    return iter(mixed)


def begin_worker(_: int) -> None:
    """A worker ends with its rank, and leaves Ctrl-C to the launcher."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def worker_pipeline(options: RankStream) -> Any:
    """What each worker does: its shards, for ever, to small batches."""
    import webdataset as wds

    return wds.DataPipeline(
        Passes(options),
        Samples(options),
        wds.filters.shuffle(options.buffer, initial=min(100, options.buffer), seed=stream_seed(options, 1)),
        Decoded(options),
        wds.filters.batched(WORKER_BATCH, collation_fn=collated, partial=False),
    )


@dataclass(frozen=True)
class Passes:
    """A worker's shards, pass after pass, each time in another order."""

    options: RankStream

    def __call__(self) -> Iterator[tuple[int, int]]:
        """Yields the number of the pass and that of a shard."""
        number, workers = worker_of()
        own = range(number, len(self.options.index.shards), workers)
        passes = 0
        while own:
            stream = sampling.random_stream(sampling.ORDER, stream_seed(self.options, 2), passes, number)
            for place in stream.permutation(len(own)).tolist():
                yield passes, own[place]
            passes += 1


class Stored(NamedTuple):
    """A sample as it is stored, in which pass it comes, and what reads it again from a healed copy of its shard."""

    passes: int
    sample: Encoded
    healed: Callable[[], Encoded]


@dataclass(frozen=True)
class Samples:
    """The samples of shards, each shard from its beginning to its end."""

    options: RankStream

    def __call__(self, shards: Iterable[tuple[int, int]]) -> Iterator[Stored]:
        """Yields samples while the next shard is fetched."""
        reader = ShardReader(self.options.index, self.options.cache, most_open=1)
        coming = sampling.looking_ahead(shards, 1, lambda item: reader.prefetch([item[1]]))
        for passes, shard in coming:
            end, url = int(reader.index.ends[shard]), reader.index.shards[shard].url
            for sample in range(end - reader.index.shards[shard].samples, end):

                def healed(sample: int = sample, url: str = url) -> Encoded:
                    reader.heal(sample)
                    return encoded_sample(*reader.read(sample), url)

                yield Stored(passes, encoded_sample(*reader.read(sample), url), healed)


@dataclass(frozen=True)
class Decoded:
    """Samples to images and labels."""

    options: RankStream

    def __call__(self, samples: Iterator[Stored]) -> Iterator[tuple[Tensor, Tensor] | UserError]:
        """Yields images uint8 [size, size, 3] and labels; in the end, if there is one, an error."""
        options, bad = self.options, BadSamples(self.options.bad_samples)
        number, workers = worker_of()
        most = int(options.index.counts[number::workers].sum()) + options.buffer  # all of them have come by then
        in_a_row = 0
        try:
            for stored in samples:
                found = stored.sample
                label = checked_label(found, options.classes)
                try:
                    pixels = decoded(stored)
                except DecodingError as error:
                    bad.add(found.name, str(error))
                    in_a_row += 1
                    if in_a_row > most:
                        raise UserError(f"{found.name}: no sample of its worker can be decoded ({error})") from None
                    continue
                in_a_row = 0
                yield cropped(pixels, options, stored.passes, found.name), torch.tensor(label)
        except UserError as error:
            # As a value: a DataLoader would wrap the exception into pages of its own.
            for _ in range(WORKER_BATCH):
                yield error


def decoded(stored: Stored) -> Pixels:
    """The pixels of a sample, after its shard was fetched again if our copy of that is damaged.

    Raises:
        DecodingError: it is damaged where it comes from.
    """
    try:
        return decode(stored.sample.content)
    except DecodingError:
        again = stored.healed()
        if again.content == stored.sample.content:
            raise
        return decode(again.content)


def cropped(pixels: Pixels, options: RankStream, passes: int, name: str) -> Tensor:
    """The part of an image that training sees in a pass: uint8 [size, size, 3]."""
    height, width, _ = pixels.shape
    crop = cropping.middle_crop(height, width)
    if options.crop == "resized_crop":
        identity = np.array([zlib.crc32(name.encode())])
        crop = cropping.random_crop(cropping.draw(options.seed, passes, identity)[0], height, width)
    return torch.from_numpy(np.ascontiguousarray(cropping.resized(pixels, crop, options.size)))


def collated(samples: list[Any]) -> tuple[Tensor, Tensor] | UserError:
    """Samples as a batch, or the error that is among them."""
    for sample in samples:
        if isinstance(sample, UserError):
            return sample
    images, labels = zip(*cast("list[tuple[Tensor, Tensor]]", samples), strict=True)
    return torch.stack(images), torch.stack(labels)


def raised(batches: Iterable[Any]) -> Iterator[Any]:
    """Raises errors that come among batches."""
    for batch in batches:
        if isinstance(batch, UserError):
            raise batch
        yield batch


def worker_of() -> tuple[int, int]:
    """Which worker this process is, and of how many; the rank's own process is the only one of one."""
    from torch.utils.data import get_worker_info

    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


def stream_seed(options: RankStream, purpose: int) -> int:
    """A seed that differs for ranks, for the places that runs begin at, and for purposes."""
    words = [options.seed, options.rank, options.start, purpose]
    return int(np.random.SeedSequence(words).generate_state(1)[0])
