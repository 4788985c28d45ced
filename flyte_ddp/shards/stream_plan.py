"""How many batches each rank gets of shards that webdataset reads as a stream, from the shards' lengths alone.

The counterpart of ``simdist.py`` (tmbdev-archive/wds-distributed), which runs all the loaders to count their batches.
The rules are webdataset's (1.0.2) and torch's: shard ``i`` goes to rank ``i % ranks``, and there to reader ``i // ranks
% readers``. Each reader cuts its samples into batches, ``dsrepeat`` times; the loader takes all readers' batches,
``repeat`` times, and is cut off after ``nbatches``. Shuffling changes which samples those are, and no number here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.errors import UserError
from flyte_ddp.shards.plan_request import PlanRequest

Counts = NDArray[np.int64]


def format_range(numbers: Counts) -> str:
    """Return the least and the greatest of the numbers; one number where all are equal."""
    least, most = int(numbers.min()), int(numbers.max())
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def sum_by_reader(values: Counts, ranks: int, readers: int) -> Counts:
    """Return the sum over each reader's shards, [ranks, readers], of one value for each shard, [shards]."""
    padded = np.pad(values, (0, -len(values) % (ranks * readers)))
    return np.asarray(padded.reshape(-1, readers, ranks).sum(axis=0).T)


@dataclass(frozen=True, eq=False)
class StreamPlan:
    """What the loaders of all ranks give.

    Args:
        request: the numbers of nodes, ranks and workers, and the loaders' options.
        counts: samples of each shard, [shards], in the order of the list that all ranks are given.
        sizes: bytes of each shard, [shards]; None if they are not known.

    Raises:
        UserError: a reader would have no samples; webdataset raises "No samples found in dataset" in it.
    """

    request: PlanRequest
    counts: Counts
    sizes: Counts | None = None

    def __post_init__(self) -> None:
        shards, ranks, readers = len(self.counts), self.request.all_ranks, self.request.readers
        if shards < ranks * readers:
            fix = f"at most {shards // ranks} workers" if shards >= ranks else f"at most {shards:,} ranks"
            raise UserError(
                f"{shards:,} shards for ranks x workers = {ranks:,} x {readers}: webdataset ends with an error in a "
                f"worker without samples; take {fix}, or at least {ranks * readers:,} shards"
            )
        for rank, reader in np.argwhere(self.samples == 0):
            raise UserError(
                f"all shards of rank {rank}'s worker {reader} are empty: webdataset ends with an error in a worker "
                "without samples; leave out empty shards, or take fewer workers"
            )

    @cached_property
    def samples(self) -> Counts:
        """Samples in each reader's shards, [ranks, readers]."""
        return sum_by_reader(self.counts, self.request.all_ranks, self.request.readers)

    @cached_property
    def batches_of_pass(self) -> Counts:
        """Batches of each rank, [ranks], if every reader goes through its shards once."""
        batch_size = self.request.batch_size
        of_readers = -(-self.samples // batch_size) if self.request.partial else self.samples // batch_size
        return np.asarray(of_readers.sum(axis=1))

    @cached_property
    def batches(self) -> Counts:
        """Batches that each rank gets in all, [ranks]."""
        batches = self.request.repeat * self.request.dsrepeat * self.batches_of_pass
        return np.minimum(batches, self.request.nbatches) if self.request.nbatches else batches

    @property
    def hangs(self) -> bool:
        """Whether ranks get different numbers of batches, so that with DDP some wait for the others for ever."""
        return bool(self.batches.min() != self.batches.max())

    def with_options(self, **options: Any) -> StreamPlan:
        """Return the plan of the same shards with other options of the request."""
        return StreamPlan(replace(self.request, **options), self.counts)

    def suggest(self) -> list[dict[str, int]]:
        """Return changes of options near the plan's, each of which gives all ranks the same number of batches.

        They are: the largest ``nbatches`` that every rank reaches; ``nbatches`` that keeps what the longest rank gets,
        with the least ``dsrepeat`` with which all reach it; the nearest numbers of ``workers`` below and above, up to
        twice as many; the nearest numbers of ``shards`` that divide evenly, if all have equal numbers of samples.
        """
        least, most = int(self.batches.min()), int(self.batches.max())
        found = [{"nbatches": least}] if least else []
        if shortest := self.request.repeat * int(self.batches_of_pass.min()):
            found.append({"nbatches": most, "dsrepeat": -(-most // shortest)})
        readers, shards, divisor = self.request.readers, len(self.counts), self.samples.size
        for nearby in (range(readers - 1, 0, -1), range(readers + 1, 2 * readers + 1)):
            found += [{"workers": workers} for workers in nearby if self.works_with(workers)][:1]
        evenly = {shards // divisor * divisor, -(-shards // divisor) * divisor} - {0}
        return found + [{"shards": number} for number in sorted(evenly)]

    def works_with(self, workers: int) -> bool:
        """Return whether all ranks get the same number of batches, at least one, with so many workers."""
        with suppress(UserError):
            plan = self.with_options(workers=workers)
            return not plan.hangs and bool(plan.batches.any())
        return False

    @property
    def advice(self) -> str:
        """The suggestions in words."""
        ways = [" with ".join(f"{name}={number}" for name, number in way.items()) for way in self.suggest()]
        return f"take {', or '.join(ways)} (of shards with equal numbers of samples)"

    def refuse_hang(self) -> None:
        """Raise UserError if ranks get different numbers of batches, or none gets any."""
        if not self.batches.any():
            raise UserError(
                f"batch_size={self.request.batch_size}: no worker has more than {self.samples.max():,} samples, and "
                "smaller batches are dropped; lower batch_size or workers, or keep partial batches"
            )
        if self.hangs:
            batches = format_range(self.batches)
            raise UserError(f"the ranks get {batches} batches: DDP hangs unless all get the same number; {self.advice}")

    def describe(self, limit: int = 8) -> Iterator[str]:
        """Yield the plan's lines: a table of the first ``limit`` ranks, bytes, and whether DDP would hang."""
        request, samples = self.request, self.samples.sum(axis=1)
        yield (
            f"{len(self.counts):,} shards with {samples.sum():,} samples; nodes x ranks x workers = {request.nodes:,} "
            f"x {request.ranks:,} x {request.workers:,}; batches of {request.batch_size:,}"
        )
        row = "{:>6}{:>10}{:>14}{:>11}".format
        yield row("rank", "shards", "samples", "batches")
        for rank in range(min(limit, request.all_ranks)):
            shards = len(range(rank, len(self.counts), request.all_ranks))
            yield row(rank, f"{shards:,}", f"{samples[rank]:,}", f"{self.batches[rank]:,}")
        if (others := self.batches[limit:]).size:
            yield f"and {others.size:,} more with {format_range(others)} batches each"
        if self.sizes is not None:
            of_nodes = sum_by_reader(self.sizes, request.all_ranks, 1).reshape(request.nodes, -1).sum(axis=1)
            yield f"bytes of a node's shards: {format_range(of_nodes)}"
        if self.hangs:
            yield f"DDP would hang, as ranks get different numbers of batches; {self.advice}"
        elif self.batches.any():
            yield f"every rank gets {self.batches[0]:,} batches"
        else:
            yield "no rank gets a batch: every worker has fewer samples than one takes"
        if request.partial and (self.samples % request.batch_size).any():
            yield "some batches are partial: where ranks' batches differ in size, DDP weighs samples unequally"
