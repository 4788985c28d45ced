"""What every rank gets when a sharded data set is read as a stream, computed from the shards' lengths alone.

The counterpart of ``simdist.py`` (tmbdev-archive/wds-distributed), which runs all the loaders to count their batches.
The rules are webdataset's (1.0.2) and torch's: shards are dealt to ranks and then to each rank's workers, each worker
shuffles and batches its own samples, and repeats that; the loader takes batches of its workers in turn, is repeated
itself, and is cut off after ``nbatches``. Shuffling the shards within a worker changes the order they are opened in,
and no number here.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from flyte_ddp.errors import UserError
from flyte_ddp.shards.stream_readers import (
    Counts,
    Gang,
    StreamOptions,
    begun_passes,
    by_reader,
    checked,
    first_batches,
    reader_shards,
    refuse_idle_readers,
    sizes_in_order,
)

__all__ = ["Bounds", "Counts", "Gang", "StreamOptions", "StreamPlan", "Suggestions", "plan_streams"]


class Bounds(NamedTuple):
    """Two numbers that another is certain not to be outside of; it is exact where they are equal."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least:,}" if self.least == self.most else f"{self.least:,} to {self.most:,}"


@dataclass(frozen=True, kw_only=True)
class Suggestions:
    """Numbers near the planned ones with which all ranks get the same number of batches; each stands on its own.

    Args:
        nbatches: the largest that every rank reaches; None if a rank gets no batch at all.
        repeated: nbatches that keeps what the longest rank gets, and the least dsrepeat with which all reach it.
        workers: the nearest numbers below and above that do it with these very shards; none above twice as many.
        fewer_shards: the nearest number of shards, not above the present one, that divides evenly; None if that is 0.
        more_shards: the nearest that is not below. Both presume shards with equal numbers of samples.

    """

    nbatches: int | None
    repeated: tuple[int, int] | None
    workers: tuple[int, ...]
    fewer_shards: int | None
    more_shards: int

    def __str__(self) -> str:
        ways = []
        if self.nbatches is not None:
            ways.append(f"nbatches={self.nbatches}")
        if self.repeated is not None:
            ways.append("nbatches={} with dsrepeat={}".format(*self.repeated))
        ways += [f"workers={workers}" for workers in self.workers]
        shards = " or ".join(
            f"{number:,}" for number in sorted({self.fewer_shards or self.more_shards, self.more_shards})
        )
        return ", or ".join([*ways, f"{shards} shards with equal numbers of samples"])


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamPlan:
    """What the readers of all ranks give and read, [ranks, readers] where nothing else is said.

    A pass is one reading of a reader's shards, of which it gives all samples, or all but the last, or the first until
    nbatches. Which ones a single pass leaves out is up to the shuffle, and so is how many several passes all leave out:
    the number of different samples is known within bounds, which differ only where a reader begins several passes and
    one of them leaves something out.

    Args:
        options: as they were given.
        gang: likewise.
        shard_samples: samples of each shard, [shards].
        samples: in the reader's shards; no other reader has them.
        reader_batches: that the loader takes from it, in all its passes.
        partial_batches: those among them that are smaller than the rest.
        delivered: samples in these batches; one that comes again counts again.
        distinct_least: different samples among the delivered ones, at least; this many if nothing is shuffled.
        distinct_most: likewise, at most.
        passes: that the reader begins until the loader's last batch is taken; a worker that reads ahead of nbatches
            may by then have begun another.
        bytes_read: by each node, without a cache, [nodes]: all shards in all passes. Exact where nbatches cuts nothing
            off; where it does, the rest of a reader's last pass may stay unread. None if the sizes are not known.
        bytes_cached: by each node that keeps what it reads, [nodes]: the shards of its ranks, each once.

    """

    options: StreamOptions
    gang: Gang
    shard_samples: Counts
    samples: Counts
    reader_batches: Counts
    partial_batches: Counts
    delivered: Counts
    distinct_least: Counts
    distinct_most: Counts
    passes: Counts
    bytes_read: Counts | None
    bytes_cached: Counts | None

    @cached_property
    def batches(self) -> Counts:
        """That each rank gets, [ranks]."""
        return np.asarray(self.reader_batches.sum(axis=1))

    @property
    def dropped(self) -> Bounds:
        """Samples of the data set that no rank ever gets."""
        samples = int(self.samples.sum())
        return Bounds(samples - int(self.distinct_most.sum()), samples - int(self.distinct_least.sum()))

    @property
    def repeated(self) -> Bounds:
        """Deliveries of samples beyond each one's first."""
        delivered = int(self.delivered.sum())
        return Bounds(delivered - int(self.distinct_most.sum()), delivered - int(self.distinct_least.sum()))

    @property
    def pass_samples(self) -> Counts:
        """Samples that each reader delivers in a pass that nbatches does not cut, [ranks, readers]."""
        return np.minimum(self.options.pass_batches(self.samples) * self.options.batch_size, self.samples)

    @property
    def hangs(self) -> bool:
        """Whether ranks get different numbers of batches: with DDP, those with more wait for the others for ever."""
        return bool(self.batches.min() != self.batches.max())

    @cached_property
    def uneven(self) -> bool:
        """Whether ranks' batches differ in size in a step that all reach: DDP's mean then weighs samples unequally."""
        if not self.partial_batches.any():
            return False
        steps = int(self.batches.min())
        # Ranks whose readers have the same numbers of samples have the same batches: one of a kind is enough.
        kinds = (sizes_in_order(kind, self.options, steps) for kind in np.unique(self.samples, axis=0))
        first = next(kinds)
        return any(not np.array_equal(kind, first) for kind in kinds)

    @property
    def consistent(self) -> bool:
        """simdist.py's own criterion: whether all ranks have the same numbers of batches of each size, in any order."""
        first = self.batch_sizes(0)
        return all(self.batch_sizes(rank) == first for rank in range(1, self.gang.ranks))

    def batch_sizes(self, rank: int) -> Counter[int]:
        """How many batches of each size a rank gets."""
        partial = self.partial_batches[rank]
        counts = Counter({self.options.batch_size: int(self.batches[rank] - partial.sum())})
        for samples, number in zip(self.samples[rank].tolist(), partial.tolist(), strict=True):
            counts[samples % self.options.batch_size] += number
        return +counts

    def sizes_in_order(self, rank: int) -> Counts:
        """The sizes of the batches that a rank gets, in their order, [batches of the rank]."""
        return sizes_in_order(self.samples[rank], self.options, int(self.batches[rank]))

    def splits(self) -> Iterator[tuple[int, int, range]]:
        """Each rank and reader with its shards, as places in the list (``--showsplits``)."""
        for rank, reader in np.ndindex(self.samples.shape):
            yield rank, reader, self.reader_shards(rank, reader)

    def reader_shards(self, rank: int, reader: int) -> range:
        """A reader's shards, as places in the list, in the order in which it opens them unless it shuffles them."""
        return reader_shards(rank, reader, self.gang.ranks, self.options.readers, len(self.shard_samples))

    def openings(self, rank: int, reader: int) -> Iterator[tuple[int, int]]:
        """Each shard that a reader opens, in order, after the number of its pass, from 0 (``--showopen``).

        Readers run side by side, so what different ones open is in no order.
        """
        for number in range(int(self.passes[rank, reader])):
            for shard in self.reader_shards(rank, reader):
                yield number, shard

    def suggestions(self) -> Suggestions:
        """Nearby numbers that make all ranks get the same number of batches."""
        options = self.options
        shortest = options.repeat * int(options.pass_batches(self.samples).sum(axis=1).min())
        longest = int(self.batches.max())
        shards, divisor = len(self.shard_samples), self.samples.size
        return Suggestions(
            nbatches=int(self.batches.min()) or None,
            repeated=(longest, -(-longest // shortest)) if shortest else None,
            workers=self._nearby_workers(),
            fewer_shards=shards // divisor * divisor or None,
            more_shards=-(-shards // divisor) * divisor,
        )

    def _nearby_workers(self) -> tuple[int, ...]:
        present = self.options.readers
        below = next(filter(self._works_with, range(present - 1, 0, -1)), None)
        above = next(filter(self._works_with, range(present + 1, 2 * present + 1)), None)
        return tuple(workers for workers in (below, above) if workers is not None)

    def _works_with(self, workers: int) -> bool:
        if len(self.shard_samples) < self.gang.ranks * workers:
            return False
        samples = by_reader(self.shard_samples, self.gang.ranks, workers)
        batches = dataclasses.replace(self.options, workers=workers).planned_batches(samples)
        return bool(samples.all() and batches.min() == batches.max() > 0)

    def refuse(self) -> None:
        """Does nothing if all ranks get the same number of batches, at least one.

        Raises:
            UserError: DDP would hang, or have nothing to do.

        """
        if not self.batches.any():
            raise UserError(
                f"batch_size={self.options.batch_size}: no worker has more than {self.samples.max():,} samples, and "
                "smaller batches are dropped; lower batch_size or workers, or keep partial batches"
            )
        if self.hangs:
            raise UserError(
                f"the ranks get {Bounds(self.batches.min(), self.batches.max())} batches: DDP hangs unless all get "
                f"the same number; take {self.suggestions()}"
            )

    def describe(self, limit: int = 8) -> str:
        """The plan for people: a table of the first ``limit`` ranks, what it comes to, and the verdict."""
        gang, options = self.gang, self.options
        headline = (
            f"{len(self.shard_samples):,} shards with {self.samples.sum():,} samples; nodes x ranks x workers = "
            f"{gang.nodes:,} x {gang.ranks_per_node:,} x {options.workers:,}; batches of {options.batch_size:,}"
        )
        return "\n".join([headline, *self._table(limit), *self._totals(), *self._verdict()])

    def _table(self, limit: int) -> Iterator[str]:
        row = "{:>6}{:>10}{:>14}{:>11}{:>9}{:>14}".format
        yield row("rank", "shards", "samples", "batches", "partial", "delivered")
        columns = (self.samples, self.reader_batches, self.partial_batches, self.delivered)
        for rank in range(min(limit, self.gang.ranks)):
            shards = len(range(rank, len(self.shard_samples), self.gang.ranks))
            yield row(rank, f"{shards:,}", *(f"{column[rank].sum():,}" for column in columns))
        if (others := self.batches[limit:]).size:
            yield f"and {others.size:,} more with {Bounds(others.min(), others.max())} batches each"

    def _totals(self) -> Iterator[str]:
        yield f"samples delivered: {self.delivered.sum():,}; never: {self.dropped}; more than once: {self.repeated}"
        for what, numbers in {"without a cache": self.bytes_read, "with one": self.bytes_cached}.items():
            if numbers is not None:
                yield f"bytes that a node reads {what}: {Bounds(numbers.min(), numbers.max())}"
        if self.dropped.least != self.dropped.most:
            yield "a range of samples: the fewest and the most that it can be, as a shuffle decides where nbatches cuts"
        if any(column is not None and column.min() != column.max() for column in (self.bytes_read, self.bytes_cached)):
            yield "a range of bytes: from the node that reads least to the one that reads most"

    def _verdict(self) -> Iterator[str]:
        if self.hangs:
            yield f"DDP would hang, as ranks get different numbers of batches; take {self.suggestions()}"
        elif self.batches.any():
            yield f"every rank gets {self.batches[0]:,} batches"
        else:
            yield "no rank gets a batch: every worker has fewer samples than one takes"
        if self.uneven:
            yield "batches of the same step differ in size, so DDP weighs samples unequally: drop partial batches"


def plan_streams(samples: Counts, sizes: Counts | None, gang: Gang, options: StreamOptions) -> StreamPlan:
    """Computes what each rank and reader gets.

    Args:
        samples: of each shard, [shards], in the order of the list that all ranks are given.
        sizes: bytes of each shard, [shards]; None if they are not known.
        gang: nodes and ranks.
        options: of each rank's loader.

    Raises:
        UserError: there are no shards, numbers are negative or missing, or a worker would have no samples. webdataset
            itself raises "No samples found in dataset" in such a worker.

    """
    shard_samples = checked(samples, "samples")
    by_readers = by_reader(shard_samples, gang.ranks, options.readers)
    refuse_idle_readers(by_readers, len(shard_samples))
    in_pass = options.pass_batches(by_readers)
    available = options.dsrepeat * in_pass.sum(axis=1)  # in one pass of the loader
    whole, rest = np.divmod(options.planned_batches(by_readers), np.maximum(available, 1))
    in_cut = first_batches(options.dsrepeat * in_pass, rest)
    batches = whole[:, None] * options.dsrepeat * in_pass + in_cut
    # Each pass of the loader makes its readers begin anew, so all passes but a reader's last are whole.
    ended = batches // np.maximum(in_pass, 1)
    remainder = by_readers % options.batch_size
    partial_batches = ended * (remainder > 0) * options.partial
    delivered = options.batch_size * (batches - partial_batches) + remainder * partial_batches
    longest_pass = options.batch_size * np.minimum(in_pass, batches)
    passes = begun_passes(in_pass, in_cut, whole, rest, options.dsrepeat)
    read = cached = None
    if sizes is not None:
        reader_sizes = by_reader(checked(sizes, "sizes", len(shard_samples)), gang.ranks, options.readers)
        read, cached = (total.reshape(gang.nodes, -1).sum(axis=1) for total in (reader_sizes * passes, reader_sizes))
    return StreamPlan(
        options=options,
        gang=gang,
        shard_samples=shard_samples,
        samples=by_readers,
        reader_batches=batches,
        partial_batches=partial_batches,
        delivered=delivered,
        distinct_least=np.minimum(longest_pass, by_readers),
        distinct_most=np.minimum(delivered, by_readers),
        passes=passes,
        bytes_read=read,
        bytes_cached=cached,
    )
