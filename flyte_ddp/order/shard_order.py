"""The global order of samples in shards, in which only a few shards are open at a time, so that a small cache will do.

Each epoch permutes the shards, and the samples within each shard; one after another they are the epoch's *sequence*.
The sequence is cut into ``shuffle_streams`` *streams*, stretches of nearly equal length. A global batch takes the next
samples of each stream, the same number of each. A rank's share of a batch is a slice of it (of each micro-batch, if
gradients are accumulated), so a rank reads only the shards of the streams that its slice overlaps.

MosaicML's streaming cuts its sequence into ``num_canonical_nodes`` parts for the same reason, and gives each node whole
parts. Here every batch is of all streams, so the number of nodes or ranks does not enter at all. There is no shuffle
block beyond the shard, no sample is dropped or repeated to make numbers even, and any batch can be computed by itself:
the order is a function of (seed, epoch, step).
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.catalog import encoded_kind
from flyte_ddp.config import Hyperparameters
from flyte_ddp.order import sampling
from flyte_ddp.order.sampling import Indices

TEST_FRACTION = 0.1  # held out for testing where no test set is given
SPLITS = ("training", "validation", "test")


def streams_of_rank(shuffle_streams: int, ranks: int, parts: int = 1) -> int:
    """Return how many streams a rank's slices of a batch overlap at the most; ``parts`` is that of micro-batches."""
    return min(shuffle_streams, parts * (-(-shuffle_streams // (parts * ranks)) + 1))


def take_fraction(fraction: float, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return whole numbers near ``fraction * counts``, whose cumulative sums are off by at most one half."""
    ends: NDArray[np.int64] = np.floor(np.cumsum(counts) * fraction + 0.5).astype(np.int64)
    shares: NDArray[np.int64] = np.diff(ends, prepend=0)
    return shares


@dataclass(frozen=True, eq=False)
class ShardSplits:
    """Which samples of each shard are for training, validation and testing: about the same share of every shard.

    Args:
        counts: samples of each shard, [shards].
        validation_fraction: share of the samples that are not for testing.
        test_fraction: share of the samples for testing, which are the same ones with any seed.
        seed: of the choice between training and validation.
    """

    counts: NDArray[np.int64]
    validation_fraction: float
    test_fraction: float
    seed: int

    @functools.cached_property
    def sizes(self) -> dict[str, NDArray[np.int64]]:
        """[shards] the number of samples of each split."""
        test = take_fraction(self.test_fraction, self.counts)
        validation = take_fraction(self.validation_fraction, self.counts - test)
        return {"training": self.counts - test - validation, "validation": validation, "test": test}

    def samples(self, shard: int, split: str) -> NDArray[np.int64]:
        """Return the numbers within the shard of the split's samples, ascending."""
        tests, held_out = (int(self.sizes[name][shard]) for name in ("test", "validation"))
        numbers = np.arange(self.counts[shard])
        if tests:
            numbers = sampling.random_stream(sampling.TEST, 0, shard).permutation(numbers)
            if split == "test":
                return np.sort(numbers[:tests])
            numbers = np.sort(numbers[tests:])
        if held_out:
            numbers = sampling.random_stream(sampling.SPLIT, self.seed, shard).permutation(numbers)
            numbers = np.sort(numbers[:held_out] if split == "validation" else numbers[held_out:])
        return numbers


class WholeShardSplits(ShardSplits):
    """Whole shards for training, validation and testing, at least one for each fraction that is not 0.

    For webdataset's streams, which read whole shards only.
    """

    @functools.cached_property
    def sizes(self) -> dict[str, NDArray[np.int64]]:
        """[shards] the number of samples of each split."""
        rest, shards = np.arange(len(self.counts)), {}
        for split, fraction, seed, purpose in (
            ("test", self.test_fraction, 0, sampling.TEST),
            ("validation", self.validation_fraction, self.seed, sampling.SPLIT),
        ):
            mixed = sampling.random_stream(purpose, seed).permutation(rest)
            held_out = max(1, round(fraction * len(rest))) if fraction else 0
            shards[split], rest = mixed[:held_out], np.sort(mixed[held_out:])
        shards["training"] = rest
        every = np.arange(len(self.counts))
        return {split: np.where(np.isin(every, own), self.counts, 0) for split, own in shards.items()}

    def samples(self, shard: int, split: str) -> NDArray[np.int64]:
        """Return the numbers within the shard of the split's samples: all of them, or none."""
        return np.arange(self.sizes[split][shard])


class ShardOrder(sampling.Order):
    """The order of one split of a data set of shards.

    Args:
        splits: the division of the shards' samples.
        split: training, validation or test.
        weights: [shards] how many times an epoch goes through each shard's samples. Samples per epoch are ``weight *
            size``, rounded so that the total is exact. A shard with a fractional weight continues in the next epoch
            where it stopped. Shards whose share is below one sample may contribute none in any epoch.
        seed: of the order.
        shuffle_streams: how many streams a batch is drawn from.
    """

    def __init__(
        self, splits: ShardSplits, split: str, weights: NDArray[np.float64], seed: int = 0, shuffle_streams: int = 1
    ) -> None:
        self.splits, self.split, self.seed, self.shuffle_streams = splits, split, seed, shuffle_streams
        self.available = splits.sizes[split]
        self.taken = spread_by_weight(self.available, weights)
        self.total = int(self.taken.sum())
        self.firsts = np.cumsum(splits.counts) - splits.counts  # each shard's first sample in the whole data set
        self.ends = np.cumsum(self.available)
        # For the shards in use: each stream's, and the shard before or after it.
        cached = functools.lru_cache(maxsize=4 * shuffle_streams + 4)
        self.members = cached(functools.partial(splits.samples, split=split))
        self.mixed = cached(self._mixed)
        self.sequence = functools.lru_cache(maxsize=2)(self._sequence)

    def __len__(self) -> int:
        return self.total

    def samples(self, place: slice) -> Indices:
        """Return the split's samples in a slice of the shards' order, each once whatever its weight."""
        found = find_pieces(self.ends, place.start, place.stop)
        return concatenate(self.firsts[shard] + self.members(shard)[part] for shard, part in found)

    def substitutes(self, sample: int) -> Indices:
        """Return the split's samples in the shard of this one."""
        shard = int(np.searchsorted(self.firsts, sample, side="right")) - 1
        samples: Indices = self.firsts[shard] + self.members(shard)
        return samples

    def batches(self, epoch: int, batch_size: int, first: int = 0) -> Iterator[Indices]:
        """Yield the epoch's global batches from number ``first`` on; the last one may be smaller."""
        for number in range(first, sampling.steps_per_epoch(self.total, batch_size)):
            yield self.batch(epoch, batch_size, number)

    def batch(self, epoch: int, batch_size: int, number: int) -> Indices:
        """Return one global batch: its samples of the first stream, then of the second, and so on."""
        starts, each = self.stream_starts(batch_size)
        full, ragged = divmod(self.total, batch_size)
        begins = starts + number * each
        ends = begins + (each if number < full else shares(ragged, len(each)))
        shards, ends_of_shards = self.sequence(epoch)
        return concatenate(
            self.mixed(epoch, int(shards[place]))[part]
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
            for place, part in find_pieces(ends_of_shards, begin, end)
        )

    def lookahead(self, batch_size: int, *, mixed: bool) -> int:
        """Return how many batches a shard lasts: while one shard is read the next one is fetched."""
        longest = int(self.taken.max()) if mixed else int(self.available.max())
        return -(-longest // max(1, batch_size // self.shuffle_streams if mixed else batch_size))

    def stream_starts(self, batch_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where each stream begins in the epoch's sequence, and its samples in a full batch, both [streams]."""
        full, ragged = divmod(self.total, batch_size)
        streams = min(self.shuffle_streams, batch_size)
        each = shares(batch_size, streams)
        lengths = full * each + shares(ragged, streams)
        return np.cumsum(lengths) - lengths, each

    def _sequence(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the epoch's shards in its order, and the cumulative sums of their samples."""
        used = np.flatnonzero(self.taken)
        shards = sampling.random_stream(sampling.ORDER, self.seed, epoch).permutation(used)
        return shards, np.cumsum(self.taken[shards])

    def _mixed(self, epoch: int, shard: int) -> Indices:
        """Return the samples that an epoch takes from a shard, permuted."""
        numbers, taken = self.members(shard), int(self.taken[shard])
        if taken != len(numbers):
            cycle = sampling.random_stream(sampling.CYCLE, self.seed, shard).permutation(numbers)
            numbers = cycle[np.arange(epoch * taken, (epoch + 1) * taken) % len(cycle)]
        mixed = sampling.random_stream(sampling.WITHIN, self.seed, epoch, shard).permutation(numbers)
        samples: Indices = self.firsts[shard] + mixed
        return samples


def find_pieces(ends: NDArray[np.int64], start: int, end: int) -> Iterator[tuple[int, slice]]:
    """Yield the shards between two places of a sequence, each with its slice between them, given all shards' ends."""
    while start < end:
        shard = int(np.searchsorted(ends, start, side="right"))
        first, until = int(ends[shard - 1]) if shard else 0, min(end, int(ends[shard]))
        yield shard, slice(start - first, until - first)
        start = until


def concatenate(parts: Iterable[Indices]) -> Indices:
    """Return all parts, of which there may be none, one after another."""
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def shard_orders(
    counts: NDArray[np.int64], weights: NDArray[np.float64], hp: Hyperparameters, test_fraction: float
) -> dict[str, ShardOrder]:
    """Return the orders of the splits training, validation and test; of a stream each split has shards of its own.

    Args:
        counts: samples of each shard, [shards].
        weights: of each shard in training, [shards]; the other splits have each sample once.
        hp: with ``dataset``, ``validation_fraction``, ``seed`` and ``shuffle_shards``.
        test_fraction: share of the samples for testing; 0 where there is a ``test_dataset``.
    """
    kind = WholeShardSplits if encoded_kind(hp.dataset) == "stream" else ShardSplits
    splits, even = kind(counts, hp.validation_fraction, test_fraction, hp.seed), np.ones(len(counts))
    training = ShardOrder(splits, "training", weights, hp.seed, hp.shuffle_shards)
    return {"training": training, **{split: ShardOrder(splits, split, even) for split in ("validation", "test")}}


def spread_by_weight(available: NDArray[np.int64], weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return how many samples an epoch takes from each shard, [shards], given those available and the weights."""
    taken = np.zeros_like(available)
    for weight in np.unique(weights):
        chosen = (weights == weight) & (available > 0)
        taken[chosen] = take_fraction(float(weight), available[chosen])
    return taken


def shares(length: int, parts: int) -> NDArray[np.int64]:
    """Return the lengths, [parts], of all slices that :func:`flyte_ddp.order.sampling.share` makes of so many items."""
    return length // parts + (np.arange(parts) < length % parts).astype(np.int64)
