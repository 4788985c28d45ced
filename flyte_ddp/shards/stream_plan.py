"""What every rank gets when a sharded data set is read as a stream, computed from the shards' lengths alone.

The counterpart of ``simdist.py`` (tmbdev-archive/wds-distributed), which runs all the loaders to count their batches.
The rules are webdataset's (1.0.2) and torch's: shard ``i`` goes to rank ``i % ranks``, and there to reader ``i // ranks
% readers``: a worker of the rank's loader, or the rank's own process where it has none. Each reader cuts its samples
into batches, pass by pass; the loader takes one batch of each in turn, leaving out those that have ended, is repeated
itself, and is cut off after ``nbatches``. Shuffling changes which samples those are, and no number here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flyte_ddp.errors import UserError
from flyte_ddp.shards.epoch_plan import Bounds, Counts, Gang, bounds


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """How each rank's loader reads its shards; the names are simdist.py's.

    Args:
        batch_size: samples of a batch.
        workers: processes of each loader; with 0 the rank's own process reads.
        nbatches: batches after which a loader is cut off; None takes all there are.
        partial: whether the smaller batch that ends a reader's pass is kept; otherwise its samples are dropped.
        repeat: passes of the loader.
        dsrepeat: passes of each reader over its shards, in each pass of the loader.

    Raises:
        UserError: a number is out of range.
    """

    batch_size: int
    workers: int
    nbatches: int | None = None
    partial: bool = False
    repeat: int = 1
    dsrepeat: int = 1

    def __post_init__(self) -> None:
        for name, least in {"batch_size": 1, "workers": 0, "nbatches": 1, "repeat": 1, "dsrepeat": 1}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name}={value}: must be at least {least}")

    @property
    def readers(self) -> int:
        """Of each rank."""
        return max(self.workers, 1)

    def pass_batches(self, samples: Counts) -> Counts:
        """Batches that readers with so many samples give in one pass; any shape."""
        return -(-samples // self.batch_size) if self.partial else samples // self.batch_size

    def planned_batches(self, samples: Counts) -> Counts:
        """Batches of each rank up to nbatches, [ranks], from its readers' samples, [ranks, readers]."""
        batches = self.repeat * self.dsrepeat * np.asarray(self.pass_batches(samples).sum(axis=1))
        return batches if self.nbatches is None else np.minimum(batches, self.nbatches)


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
        ways = [] if self.nbatches is None else [f"nbatches={self.nbatches}"]
        if self.repeated is not None:
            ways.append("nbatches={} with dsrepeat={}".format(*self.repeated))
        ways += [f"workers={workers}" for workers in self.workers]
        numbers = sorted({self.fewer_shards or self.more_shards, self.more_shards})
        shards = " or ".join(f"{number:,}" for number in numbers)
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

    def splits(self) -> Iterator[tuple[int, int, range]]:
        """Each rank and reader with its shards, as places in the list, in the order in which they are opened."""
        ranks, readers = self.samples.shape
        for rank, reader in np.ndindex(ranks, readers):
            yield rank, reader, range(rank + reader * ranks, len(self.shard_samples), ranks * readers)

    def suggestions(self) -> Suggestions:
        """Nearby numbers that make all ranks get the same number of batches."""
        options = self.options
        shortest = options.repeat * int(options.pass_batches(self.samples).sum(axis=1).min())
        longest = int(self.batches.max())
        shards, divisor = len(self.shard_samples), self.samples.size
        nearby = (range(options.readers - 1, 0, -1), range(options.readers + 1, 2 * options.readers + 1))
        found = (next(filter(self._works_with, numbers), None) for numbers in nearby)
        return Suggestions(
            nbatches=int(self.batches.min()) or None,
            repeated=(longest, -(-longest // shortest)) if shortest else None,
            workers=tuple(workers for workers in found if workers is not None),
            fewer_shards=shards // divisor * divisor or None,
            more_shards=-(-shards // divisor) * divisor,
        )

    def _works_with(self, workers: int) -> bool:
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
                f"the ranks get {bounds(self.batches)} batches: DDP hangs unless all get the same number; "
                f"take {self.suggestions()}"
            )

    def describe(self, limit: int = 8) -> Iterator[str]:
        """The plan for people: a table of the first ``limit`` ranks, what it comes to, and the verdict."""
        gang, options = self.gang, self.options
        yield (
            f"{len(self.shard_samples):,} shards with {self.samples.sum():,} samples; nodes x ranks x workers = "
            f"{gang.nodes:,} x {gang.ranks_per_node:,} x {options.workers:,}; batches of {options.batch_size:,}"
        )
        row = "{:>6}{:>10}{:>14}{:>11}{:>9}{:>14}".format
        yield row("rank", "shards", "samples", "batches", "partial", "delivered")
        columns = (self.samples, self.reader_batches, self.partial_batches, self.delivered)
        for rank in range(min(limit, gang.ranks)):
            shards = len(range(rank, len(self.shard_samples), gang.ranks))
            yield row(rank, f"{shards:,}", *(f"{column[rank].sum():,}" for column in columns))
        if (others := self.batches[limit:]).size:
            yield f"and {others.size:,} more with {bounds(others)} batches each"
        yield f"samples delivered: {self.delivered.sum():,}; never: {self.dropped}; more than once: {self.repeated}"
        read = {"without a cache": self.bytes_read, "with one": self.bytes_cached}
        of_nodes = {what: bounds(numbers) for what, numbers in read.items() if numbers is not None}
        for what, number in of_nodes.items():
            yield f"bytes that a node reads {what}: {number}"
        if self.dropped.least != self.dropped.most:
            yield "a range of samples: the fewest and the most that it can be, as a shuffle decides where nbatches cuts"
        if any(number.least != number.most for number in of_nodes.values()):
            yield "a range of bytes: from the node that reads least to the one that reads most"
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
        UserError: a worker would have no samples. webdataset itself raises "No samples found in dataset" in it.
    """
    by_readers = by_reader(samples, gang.ranks, options.readers)
    refuse_idle_readers(by_readers, len(samples))
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
    # All workers start to read when a pass of the loader begins, even those whose turn does not come. And webdataset
    # repeats nothing that has given nothing: neither a worker without a batch nor a loader without one.
    last = np.maximum(-(-in_cut // np.maximum(in_pass, 1)), 1) * (rest > 0)[:, None]
    passes = np.maximum(whole[:, None] * np.where(in_pass > 0, options.dsrepeat, 1) + last, 1)
    read = cached = None
    if sizes is not None:
        reader_sizes = by_reader(sizes, gang.ranks, options.readers)
        read, cached = (total.reshape(gang.nodes, -1).sum(axis=1) for total in (reader_sizes * passes, reader_sizes))
    return StreamPlan(
        options=options,
        gang=gang,
        shard_samples=samples,
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


def by_reader(values: Counts, ranks: int, readers: int) -> Counts:
    """Sums over each reader's shards: [shards] to [ranks, readers]."""
    rounds = -(-len(values) // (ranks * readers))
    padded = np.zeros(rounds * ranks * readers, dtype=np.int64)
    padded[: len(values)] = values
    return np.asarray(padded.reshape(rounds, readers, ranks).sum(axis=0).T)


def first_batches(counts: Counts, taken: Counts) -> Counts:
    """How many of a rank's first batches come from each of its readers, [ranks, readers].

    Args:
        counts: batches that each reader has, [ranks, readers].
        taken: how many of them the loader takes, [ranks]; no more than there are.
    """
    rounds = np.zeros_like(taken)  # the most, of each of which no reader is left out that has a batch, found bit by bit
    for bit in range(int(counts.max()).bit_length(), -1, -1):
        more = rounds + (1 << bit)
        rounds = np.where(np.minimum(counts, more[:, None]).sum(axis=1) <= taken, more, rounds)
    parts = np.minimum(counts, rounds[:, None])
    # What is left of the last round goes to the first of those that are not at their end.
    running, left = counts > rounds[:, None], taken - parts.sum(axis=1)
    return np.asarray(parts + (running & (np.cumsum(running, axis=1) <= left[:, None])))


def sizes_in_order(samples: Counts, options: StreamOptions, steps: int) -> Counts:
    """The sizes of the first batches that a loader gives, in their order, [steps].

    Args:
        samples: of each of the rank's readers, [readers].
        options: of the loader; it begins anew as often as the number of steps takes.
        steps: how many batches.
    """
    in_pass = options.pass_batches(samples)
    counts = np.minimum(in_pass * options.dsrepeat, steps)
    reader = np.repeat(np.arange(len(samples)), counts)
    turn = np.arange(len(reader)) - np.repeat(np.cumsum(counts) - counts, counts)
    ends_pass = (turn + 1) % in_pass[reader] == 0
    rest = samples[reader] - (in_pass[reader] - 1) * options.batch_size
    sizes = np.where(ends_pass & options.partial, rest, options.batch_size)
    return np.resize(sizes[np.lexsort((reader, turn))], steps)


def refuse_idle_readers(samples: Counts, shards: int) -> None:
    """Refuses to plan for readers without samples, [ranks, readers]: webdataset raises an error in them."""
    if samples.all():
        return
    ranks, readers = samples.shape
    if shards < samples.size:
        fix = f"at most {shards // ranks} workers" if shards >= ranks else f"at most {shards:,} ranks"
        raise UserError(
            f"{shards:,} shards for ranks x workers = {ranks:,} x {readers}: webdataset ends with an error in a worker "
            f"without samples; take {fix}, or at least {samples.size:,} shards"
        )
    rank, reader = np.argwhere(samples == 0)[0]
    raise UserError(
        f"all shards of rank {rank}'s worker {reader} are empty: webdataset ends with an error in a worker without "
        "samples; leave out empty shards, or take fewer workers"
    )
