"""What every rank gets when a sharded data set is read as a stream, computed from the shards' lengths alone.

The counterpart of ``simdist.py`` (tmbdev-archive/wds-distributed), which runs all the loaders to count their batches.
The rules are webdataset's (1.0.2) and torch's: shard ``i`` goes to rank ``i % ranks``, and there to reader ``i // ranks
% readers``: a worker of the rank's loader, or the rank's own process where it has none. Each reader cuts its samples
into batches, pass by pass; the loader takes one batch of each in turn, leaving out those that have ended, is repeated
itself, and is cut off after ``nbatches``. Shuffling changes which samples those are, and no number here.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flyte_ddp.errors import UserError
from flyte_ddp.shards.epoch_plan import Cluster, Counts, least_to_most


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


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamPlan:
    """What the readers of all ranks give, [ranks, readers] where nothing else is said.

    Args:
        options: as they were given.
        cluster: likewise.
        shard_samples: samples of each shard, [shards].
        samples: in the reader's shards; no other reader has them.
        reader_batches: that the loader takes from it, in all its passes.
        partial_batches: those among them that are smaller than the rest.
        delivered: samples in these batches; one that comes again counts again.
        different: different samples among the delivered ones, at least; this many if nothing is shuffled.
        bytes_cached: by each node, [nodes]: the shards of its ranks, each once. None if the sizes are not known.
    """

    options: StreamOptions
    cluster: Cluster
    shard_samples: Counts
    samples: Counts
    reader_batches: Counts
    partial_batches: Counts
    delivered: Counts
    different: Counts
    bytes_cached: Counts | None

    @cached_property
    def batches(self) -> Counts:
        """That each rank gets, [ranks]."""
        return np.asarray(self.reader_batches.sum(axis=1))

    @property
    def hangs(self) -> bool:
        """Whether ranks get different numbers of batches: with DDP, those with more wait for the others for ever."""
        return bool(self.batches.min() != self.batches.max())

    def splits(self) -> Iterator[tuple[int, int, range]]:
        """Each rank and reader with its shards, as places in the list, in the order in which they are opened."""
        ranks, readers = self.samples.shape
        for rank, reader in np.ndindex(ranks, readers):
            yield rank, reader, range(rank + reader * ranks, len(self.shard_samples), ranks * readers)

    def suggestions(self) -> list[dict[str, int]]:
        """Changes near the plan, each of which gives all ranks the same number of batches.

        They are: the largest ``nbatches`` that every rank reaches; ``nbatches`` that keeps what the longest rank gets,
        with the least ``dsrepeat`` with which all reach it; the nearest numbers of ``workers`` below and above, up to
        twice as many; the nearest numbers of ``shards`` that divide evenly, if all have equal numbers of samples.
        """
        options, shards, divisor = self.options, len(self.shard_samples), self.samples.size
        shortest = options.repeat * int(options.pass_batches(self.samples).sum(axis=1).min())
        found = []
        if least := int(self.batches.min()):
            found.append({"nbatches": least})
        if shortest:
            longest = int(self.batches.max())
            found.append({"nbatches": longest, "dsrepeat": -(-longest // shortest)})
        for nearby in (range(options.readers - 1, 0, -1), range(options.readers + 1, 2 * options.readers + 1)):
            found += [{"workers": number} for number in itertools.islice(filter(self._works_with, nearby), 1)]
        evenly = {shards // divisor * divisor, -(-shards // divisor) * divisor} - {0}
        return found + [{"shards": number} for number in sorted(evenly)]

    @property
    def advice(self) -> str:
        """The suggestions in words."""
        ways = [" with ".join(f"{name}={number}" for name, number in way.items()) for way in self.suggestions()]
        return f"take {', or '.join(ways)} (of shards with equal numbers of samples)"

    def _works_with(self, workers: int) -> bool:
        samples = by_reader(self.shard_samples, self.cluster.ranks, workers)
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
                f"the ranks get {least_to_most(self.batches)} batches: DDP hangs unless all get the same number; "
                f"{self.advice}"
            )

    def describe(self, limit: int = 8) -> Iterator[str]:
        """The plan for people: a table of the first ``limit`` ranks, what it comes to, and the verdict."""
        cluster, samples, delivered = self.cluster, self.samples.sum(), self.delivered.sum()
        yield (
            f"{len(self.shard_samples):,} shards with {samples:,} samples; nodes x ranks x workers = {cluster.nodes:,} "
            f"x {cluster.ranks_per_node:,} x {self.options.workers:,}; batches of {self.options.batch_size:,}"
        )
        row = "{:>6}{:>10}{:>14}{:>11}{:>9}{:>14}".format
        yield row("rank", "shards", "samples", "batches", "partial", "delivered")
        columns = (self.samples, self.reader_batches, self.partial_batches, self.delivered)
        for rank in range(min(limit, cluster.ranks)):
            shards = len(range(rank, len(self.shard_samples), cluster.ranks))
            yield row(rank, f"{shards:,}", *(f"{column[rank].sum():,}" for column in columns))
        if (others := self.batches[limit:]).size:
            yield f"and {others.size:,} more with {least_to_most(others)} batches each"
        never, again = samples - self.different.sum(), delivered - self.different.sum()
        yield f"samples delivered: {delivered:,}; never: at most {never:,}; more than once: at most {again:,}"
        if self.bytes_cached is not None:
            yield f"bytes of a node's shards: {least_to_most(self.bytes_cached)}"
        if self.hangs:
            yield f"DDP would hang, as ranks get different numbers of batches; {self.advice}"
        elif self.batches.any():
            yield f"every rank gets {self.batches[0]:,} batches"
        else:
            yield "no rank gets a batch: every worker has fewer samples than one takes"
        if self.partial_batches.any():
            yield "some batches are partial: where ranks' batches differ in size, DDP weighs samples unequally"


def plan_streams(samples: Counts, sizes: Counts | None, cluster: Cluster, options: StreamOptions) -> StreamPlan:
    """Computes what each rank and reader gets.

    Args:
        samples: of each shard, [shards], in the order of the list that all ranks are given.
        sizes: bytes of each shard, [shards]; None if they are not known.
        cluster: nodes and ranks.
        options: of each rank's loader.

    Raises:
        UserError: a worker would have no samples. webdataset itself raises "No samples found in dataset" in it.
    """
    by_readers = by_reader(samples, cluster.ranks, options.readers)
    refuse_idle_readers(by_readers, len(samples))
    in_pass = options.pass_batches(by_readers)
    available = options.dsrepeat * in_pass  # in one pass of the loader
    whole, rest = np.divmod(options.planned_batches(by_readers), np.maximum(available.sum(axis=1), 1))
    batches = whole[:, None] * available + first_batches(available, rest)
    # Each pass of the loader restarts its readers, so all passes but a reader's last are whole.
    ended = batches // np.maximum(in_pass, 1)
    remainder = by_readers % options.batch_size
    partial_batches = ended * (remainder > 0) * options.partial
    cached = None
    if sizes is not None:
        cached = by_reader(sizes, cluster.ranks, options.readers).reshape(cluster.nodes, -1).sum(axis=1)
    return StreamPlan(
        options=options,
        cluster=cluster,
        shard_samples=samples,
        samples=by_readers,
        reader_batches=batches,
        partial_batches=partial_batches,
        delivered=options.batch_size * (batches - partial_batches) + remainder * partial_batches,
        different=np.minimum(options.batch_size * np.minimum(in_pass, batches), by_readers),
        bytes_cached=cached,
    )


def by_reader(values: Counts, ranks: int, readers: int) -> Counts:
    """Sums over each reader's shards: [shards] to [ranks, readers]."""
    padded = np.pad(values, (0, -len(values) % (ranks * readers)))
    return np.asarray(padded.reshape(-1, readers, ranks).sum(axis=0).T)


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
