"""The global order of samples in shards: of which only a few are open at a time, so that a small cache will do.

A batch is drawn from several *shuffle streams*. Each epoch has an order of its own for the shards, and mixes the
samples of each shard. The sequence that this makes is cut into stretches of equal length, one for each shuffle stream.
Every batch takes the next samples of all streams, the same number of each. A rank's share of a batch is a slice of it
(of each micro-batch, if gradients are accumulated), so a rank reads only the shards of the streams in its slice. All of
it is a function of (seed, epoch, step), of which any part can be computed at once; the number of ranks does not enter.

The idea of a fixed number of stretches, so that the order does not depend on the number of nodes, is that of
``num_canonical_nodes`` in MosaicML's streaming.
"""

from __future__ import annotations

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
    """On how many shuffle streams a rank's slices of a batch lie at the most.

    Args:
        parts: micro-batches that a batch is cut into, of each of which the rank has a slice.
    """
    return min(shuffle_streams, parts * (-(-shuffle_streams // (parts * ranks)) + 1))


def spread(fraction: float, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """That fraction of each count in whole numbers, whose sums stay within half of one of the fraction of the sums."""
    ends: NDArray[np.int64] = np.floor(np.cumsum(counts) * fraction + 0.5).astype(np.int64)
    shares: NDArray[np.int64] = np.diff(ends, prepend=0)
    return shares


@dataclass(frozen=True, eq=False)
class ShardSplits:
    """Which samples of each shard are for training, validation and testing: about the same share of every shard.

    Args:
        counts: [shards] samples.
        validation_fraction: of the samples that are not for testing.
        test_fraction: held out whatever the seed is.
        seed: of the choice between training and validation.
    """

    counts: NDArray[np.int64]
    validation_fraction: float
    test_fraction: float
    seed: int

    @functools.cached_property
    def sizes(self) -> dict[str, NDArray[np.int64]]:
        """[shards] the number of samples of each split."""
        test = spread(self.test_fraction, self.counts)
        validation = spread(self.validation_fraction, self.counts - test)
        return {"training": self.counts - test - validation, "validation": validation, "test": test}

    def samples(self, shard: int, split: str) -> NDArray[np.int64]:
        """Numbers within the shard of the split's samples, ascending."""
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
    """Whole shards for training, validation and testing, as a stream can only be read shard by shard.

    Of each fraction that is not 0 there is at least one shard.
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
        """Numbers within the shard of the split's samples: all of them, or none."""
        return np.arange(self.sizes[split][shard])


class ShardOrder(sampling.Order):
    """One split of a data set of shards.

    Args:
        splits: of the shards' samples.
        split: which of them.
        weights: [shards] how many times an epoch goes through each shard's samples; an epoch takes the whole number
            that is nearest, over all shards together, and goes on in the next one where it has stopped in each shard.
            Of shards that have less than one sample for their weight some give none, always the same ones.
        seed: of the order.
        shuffle_streams: how many shards a batch is drawn from.
    """

    def __init__(
        self,
        splits: ShardSplits,
        split: str,
        weights: NDArray[np.float64],
        seed: int = 0,
        shuffle_streams: int = 1,
    ) -> None:
        self.splits, self.split, self.seed, self.shuffle_streams = splits, split, seed, shuffle_streams
        self.available = splits.sizes[split]
        self.taken = spread_by_weight(self.available, weights)
        self.total = int(self.taken.sum())
        self.firsts = np.cumsum(splits.counts) - splits.counts  # each shard's first sample in the whole data set
        self.ends = np.cumsum(self.available)
        # Of the shards in use: those of all streams, each with the one before or after.
        self.members = functools.lru_cache(maxsize=4 * shuffle_streams + 4)(self._members)
        self.mixed = functools.lru_cache(maxsize=4 * shuffle_streams + 4)(self._mixed)
        self.sequence = functools.lru_cache(maxsize=2)(self._sequence)

    def __len__(self) -> int:
        return self.total

    def samples(self, place: slice) -> Indices:
        """The split's samples from one place to another, in the order of the shards, each once whatever its weight."""
        found = pieces(self.ends, place.start, place.stop)
        return joined(self.firsts[shard] + self.members(shard)[part] for shard, part in found)

    def substitutes(self, sample: int) -> Indices:
        """The split's samples in the shard of this one."""
        shard = int(np.searchsorted(self.firsts, sample, side="right")) - 1
        samples: Indices = self.firsts[shard] + self.members(shard)
        return samples

    def batches(self, epoch: int, batch_size: int, first: int = 0) -> Iterator[Indices]:
        """The epoch's global batches from the ``first``-th one on; the last one may be smaller."""
        for number in range(first, sampling.steps_per_epoch(self.total, batch_size)):
            yield self.batch(epoch, batch_size, number)

    def batch(self, epoch: int, batch_size: int, number: int) -> Indices:
        """One global batch: the samples of one shuffle stream after another."""
        starts, each = self.stream_starts(batch_size)
        full, ragged = divmod(self.total, batch_size)
        begins = starts + number * each
        ends = begins + (each if number < full else shares(ragged, len(each)))
        return joined(map(functools.partial(self.stretch, epoch), begins.tolist(), ends.tolist()))

    def lookahead(self, batch_size: int, *, mixed: bool) -> int:
        """As many batches as a shard lasts: while one is read the next one is fetched."""
        longest = int(self.taken.max()) if mixed else int(self.available.max())
        return -(-longest // max(1, batch_size // self.shuffle_streams if mixed else batch_size))

    def stream_starts(self, batch_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """[streams] where each shuffle stream begins in the epoch's sequence, and its samples of a full batch."""
        full, ragged = divmod(self.total, batch_size)
        streams = min(self.shuffle_streams, batch_size)
        each = shares(batch_size, streams)
        lengths = full * each + shares(ragged, streams)
        return np.cumsum(lengths) - lengths, each

    def stretch(self, epoch: int, start: int, end: int) -> Indices:
        """Samples from one place in the epoch's sequence to another."""
        shards, ends = self.sequence(epoch)
        return joined(self.mixed(epoch, int(shards[place]))[part] for place, part in pieces(ends, start, end))

    def _sequence(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The epoch's shards in its order, and the numbers of samples up to and with each."""
        used = np.flatnonzero(self.taken)
        shards = sampling.random_stream(sampling.ORDER, self.seed, epoch).permutation(used)
        return shards, np.cumsum(self.taken[shards])

    def _members(self, shard: int) -> NDArray[np.int64]:
        """The split's samples of a shard, ascending."""
        return self.splits.samples(shard, self.split)

    def _mixed(self, epoch: int, shard: int) -> Indices:
        """The samples that an epoch takes from a shard, in the order in which it does."""
        numbers, taken = self.members(shard), int(self.taken[shard])
        if taken != len(numbers):
            cycle = sampling.random_stream(sampling.CYCLE, self.seed, shard).permutation(numbers)
            numbers = cycle[np.arange(epoch * taken, (epoch + 1) * taken) % len(cycle)]
        mixed = sampling.random_stream(sampling.WITHIN, self.seed, epoch, shard).permutation(numbers)
        samples: Indices = self.firsts[shard] + mixed
        return samples


def pieces(ends: NDArray[np.int64], start: int, end: int) -> Iterator[tuple[int, slice]]:
    """The shards that lie from one place to another, each with the part of it, given where in a sequence each ends."""
    while start < end:
        shard = int(np.searchsorted(ends, start, side="right"))
        first, until = int(ends[shard - 1]) if shard else 0, min(end, int(ends[shard]))
        yield shard, slice(start - first, until - first)
        start = until


def joined(parts: Iterable[Indices]) -> Indices:
    """All parts, one after another."""
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def shard_orders(
    counts: NDArray[np.int64],
    weights: NDArray[np.float64],
    hp: Hyperparameters,
    test_fraction: float,
) -> dict[str, ShardOrder]:
    """The orders of all splits of a training with these hyperparameters; of a stream each has shards of its own.

    Args:
        counts: [shards] samples.
        weights: [shards] of training; the other splits have each sample once.
        test_fraction: held out for testing; 0 where there is a ``test_dataset``.
    """
    kind = WholeShardSplits if encoded_kind(hp.dataset) == "stream" else ShardSplits
    splits, even = kind(counts, hp.validation_fraction, test_fraction, hp.seed), np.ones(len(counts))
    return {
        "training": ShardOrder(splits, "training", weights, hp.seed, hp.shuffle_shards),
        "validation": ShardOrder(splits, "validation", even),
        "test": ShardOrder(splits, "test", even),
    }


def spread_by_weight(available: NDArray[np.int64], weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """[shards] how many samples an epoch takes from each shard; shards without any give none."""
    taken = np.zeros_like(available)
    for weight in np.unique(weights):
        chosen = weights == weight
        taken[chosen] = spread(float(weight), available[chosen])
    return np.where(available > 0, taken, 0)


def shares(length: int, parts: int) -> NDArray[np.int64]:
    """[parts] the lengths of all slices that :func:`flyte_ddp.order.sampling.share` makes of so many items."""
    return length // parts + (np.arange(parts) < length % parts).astype(np.int64)
