"""The global order of samples in shards. Few shards are read at a time, so a small cache is enough.

Each epoch permutes the shards, and the samples within each shard. The result is the epoch's *sequence*. The sequence is
cut into ``shuffle_streams`` *streams* of nearly equal length. A global batch consists of the next samples of all
streams, equally many of each stream. Within a stream, samples are not shuffled across shards.

A rank trains on a slice of the batch (of each micro-batch, if gradients are accumulated). Thus a rank reads only shards
of the streams that the slice overlaps.

MosaicML's streaming gives each node whole parts (``num_canonical_nodes``). Here every batch has samples of all streams,
so the order does not depend on the number of nodes or ranks.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.order import sampling
from flyte_ddp.core.order.sampling import Indices

TEST_FRACTION = 0.1  # of the samples, held out for testing if there is no test set


def count_streams_per_rank(shuffle_streams: int, ranks: int, parts: int = 1) -> int:
    """Return from how many streams, at most, a rank reads in one batch.

    Args:
        shuffle_streams: Number of all streams, which are parts of an epoch's sequence of samples.
        ranks: Number of ranks.
        parts: Number of micro-batches.
    """
    return min(shuffle_streams, parts * (-(-shuffle_streams // (parts * ranks)) + 1))


def slice_lengths(length: int, parts: int) -> NDArray[np.int64]:
    """Return the lengths of the slices of :func:`take_slice`, if ``length`` items are cut into ``parts``."""
    return length // parts + (np.arange(parts) < length % parts).astype(np.int64)


def scale_counts(fraction: float, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Multiply each count by ``fraction``, and round so that the sum is also rounded correctly.

    Each cumulative sum is at most 0.5 from the exact value.
    """
    ends: NDArray[np.int64] = np.floor(np.cumsum(counts) * fraction + 0.5).astype(np.int64)
    return np.diff(ends, prepend=0)


@dataclass(frozen=True, eq=False)
class ShardSplits:
    """Divides each shard's samples into training, validation and test, with about equal shares in every shard."""

    counts: NDArray[np.int64]  # samples of each shard, [shards]
    validation_fraction: float  # of the samples outside the test split
    test_fraction: float  # of all samples
    seed: int  # of the order, and of the choice between training and validation; not of the test samples

    @functools.cached_property
    def sizes(self) -> dict[str, NDArray[np.int64]]:
        test = scale_counts(self.test_fraction, self.counts)
        validation = scale_counts(self.validation_fraction, self.counts - test)
        return {"training": self.counts - test - validation, "validation": validation, "test": test}

    def samples_in_shard(self, shard: int, split: str) -> NDArray[np.int64]:
        """Return the samples of ``split`` in a shard, ascending, as numbers within the shard.

        ``split`` is "training", "validation" or "test". If the shard has no sample of the split, the result is empty.
        """
        if not self.sizes[split][shard]:
            return np.empty(0, dtype=np.int64)
        tests, held_out = (int(self.sizes[name][shard]) for name in ("test", "validation"))
        numbers = np.arange(self.counts[shard])
        if tests:
            numbers = sampling.make_generator(sampling.TEST, 0, shard).permutation(numbers)
            if split == "test":
                return np.sort(numbers[:tests])
            numbers = np.sort(numbers[tests:])
        if held_out:
            numbers = sampling.make_generator(sampling.SPLIT, self.seed, shard).permutation(numbers)
            numbers = np.sort(numbers[:held_out] if split == "validation" else numbers[held_out:])
        return numbers


class WholeShardSplits(ShardSplits):
    """Divides whole shards, for streams. A fraction above 0 gets at least one shard."""

    @functools.cached_property
    def sizes(self) -> dict[str, NDArray[np.int64]]:
        """The samples of each split in each shard, [shards]. A shard has all of its samples in a single split."""
        every = np.arange(len(self.counts))
        rest, shards = every, {}
        for split, fraction, seed, purpose in (
            ("test", self.test_fraction, 0, sampling.TEST),
            ("validation", self.validation_fraction, self.seed, sampling.SPLIT),
        ):
            mixed = sampling.make_generator(purpose, seed).permutation(rest)
            held_out = max(1, round(fraction * len(rest))) if fraction else 0
            shards[split], rest = mixed[:held_out], np.sort(mixed[held_out:])
        shards["training"] = rest
        return {split: np.where(np.isin(every, numbers), self.counts, 0) for split, numbers in shards.items()}

    def samples_in_shard(self, shard: int, split: str) -> NDArray[np.int64]:
        return np.arange(self.sizes[split][shard])


class ShardOrder(sampling.Order):
    """The order of one split of a data set of shards."""

    def __init__(
        self, splits: ShardSplits, split: str, weights: NDArray[np.float64] | None = None, shuffle_streams: int = 1
    ) -> None:
        """Compute the sizes of the split in each shard.

        Args:
            splits: The division of each shard's samples into splits.
            split: "training", "validation" or "test".
            weights: Passes of an epoch through each shard's samples, [shards]. None means one pass. With a fractional
                weight, each epoch continues in the shard where the previous epoch stopped. If the weight gives less
                than one sample, the shard may be in no epoch.
            shuffle_streams: Number of streams.
        """
        self.splits, self.shuffle_streams = splits, shuffle_streams
        weights = np.ones(len(splits.counts)) if weights is None else weights
        # For each shard, [shards]:
        self.available = splits.sizes[split]  # samples of the split
        self.taken = np.zeros_like(self.available)  # samples in an epoch
        for weight in np.unique(weights):
            chosen = (weights == weight) & (self.available > 0)
            self.taken[chosen] = scale_counts(float(weight), self.available[chosen])
        self.firsts = np.cumsum(splits.counts) - splits.counts  # number of the first sample in the data set
        self.ends = np.cumsum(self.available)  # end in the order of evaluations
        self.total = int(self.taken.sum())
        # Caches for the shards in use: the current shard of each stream, and its neighbours.
        cached = functools.lru_cache(maxsize=4 * shuffle_streams + 4)
        self.samples_in_shard = cached(functools.partial(splits.samples_in_shard, split=split))
        self.shuffled_samples = cached(self._shuffle_samples)
        self.sequence = functools.lru_cache(maxsize=2)(self._shuffle_shards)
        self._arguments = splits, split, weights, shuffle_streams

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardOrder, self._arguments  # caches cannot be pickled

    def __len__(self) -> int:
        return self.total

    def samples_at(self, place: slice) -> Indices:
        """Return the samples at the positions ``place`` of the order of evaluations. ``place`` is a slice without step.

        The order goes shard by shard, and has each sample once. Weights of shards make no difference.
        """
        start, stop, _ = place.indices(int(self.ends[-1]))
        slices = split_range_by_shard(self.ends, start, stop)
        parts = [self.firsts[shard] + self.samples_in_shard(shard)[part] for shard, part in slices]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def list_substitutes(self, sample: int) -> Indices:
        """Return the samples that may replace a damaged sample: the split's samples in the same shard, ascending."""
        shard = int(np.searchsorted(self.firsts, sample, side="right")) - 1
        return np.asarray(self.firsts[shard] + self.samples_in_shard(shard))

    def batches(self, epoch: int, batch_size: int, first: int = 0) -> Iterator[Indices]:
        """Yield an epoch's global batches (numbers of samples), from batch ``first`` on.

        A batch has about equally many samples of each stream, in the order of the streams.
        """
        starts, each = self.locate_streams(batch_size)
        shards, ends_of_shards = self.sequence(epoch)
        full, ragged = divmod(self.total, batch_size)
        for number in range(first, sampling.steps_per_epoch(self.total, batch_size)):
            begins = starts + number * each
            ends = begins + (each if number < full else slice_lengths(ragged, len(each)))
            parts = [
                self.shuffled_samples(epoch, int(shards[place]))[part]
                for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
                for place, part in split_range_by_shard(ends_of_shards, begin, end)
            ]
            yield np.concatenate(parts)

    def count_batches_to_prefetch(self, batch_size: int, *, mixed: bool) -> int:
        """Return for how many batches ahead shards are fetched: as many as the samples of the largest shard last.

        ``mixed`` is True in an epoch of training, and False in an evaluation.
        """
        longest = int(self.taken.max()) if mixed else int(self.available.max())
        return -(-longest // max(1, batch_size // self.shuffle_streams if mixed else batch_size))

    def locate_streams(self, batch_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where each stream starts in an epoch's sequence, and how many samples each gives to a full batch.

        Both are [streams].
        """
        full, ragged = divmod(self.total, batch_size)
        streams = min(self.shuffle_streams, batch_size)
        each = slice_lengths(batch_size, streams)
        lengths = full * each + slice_lengths(ragged, streams)
        return np.cumsum(lengths) - lengths, each

    def _shuffle_shards(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return an epoch's shards in random order, and the cumulative numbers of samples at the end of each shard."""
        used = np.flatnonzero(self.taken)
        shards = sampling.make_generator(sampling.ORDER, self.splits.seed, epoch).permutation(used)
        return shards, np.cumsum(self.taken[shards])

    def _shuffle_samples(self, epoch: int, shard: int) -> Indices:
        """Return the samples that an epoch uses of a shard, in random order.

        Depending on the shard's weight, samples are repeated or missing.
        """
        numbers, taken = self.samples_in_shard(shard), int(self.taken[shard])
        if taken != len(numbers):
            # With a weight other than 1, continue in a fixed cycle of the samples where the previous epoch stopped.
            cycle = sampling.make_generator(sampling.CYCLE, self.splits.seed, shard).permutation(numbers)
            numbers = cycle[np.arange(epoch * taken, (epoch + 1) * taken) % len(cycle)]
        mixed = sampling.make_generator(sampling.WITHIN, self.splits.seed, epoch, shard).permutation(numbers)
        return np.asarray(self.firsts[shard] + mixed)


SampleOrder: TypeAlias = sampling.ListedOrder | ShardOrder  # the orders of samples that have numbers
Orders: TypeAlias = dict[str, SampleOrder]  # of "training", "validation" and "test"


def split_range_by_shard(ends: NDArray[np.int64], start: int, end: int) -> Iterator[tuple[int, slice]]:
    """Divide the positions ``start`` to ``end`` - 1 by shard: yield (shard, slice within the shard).

    ``ends`` has the position behind the last sample of each shard.
    """
    while start < end:
        shard = int(np.searchsorted(ends, start, side="right"))
        first, until = int(ends[shard - 1]) if shard else 0, min(end, int(ends[shard]))
        yield shard, slice(start - first, until - first)
        start = until
