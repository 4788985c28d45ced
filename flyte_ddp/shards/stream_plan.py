"""Compute how many batches each rank gets when webdataset reads shards as a stream, from the shards' lengths alone.

``simdist.py`` (tmbdev-archive/wds-distributed) runs all loaders to count their batches; this computes the same numbers.
The rules are those of webdataset 1.0.2 and torch. Shard ``i`` goes to rank ``i % ranks``, there to reader ``i // ranks
% readers``. Each reader cuts its samples into batches, ``dsrepeat`` times. The loader takes the batches of all readers,
``repeat`` times, and stops after ``nbatches``. Shuffling changes none of these numbers.
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
NO_SAMPLES = "webdataset ends with an error in a worker without samples"


def format_range(numbers: Counts) -> str:
    """Return the least and the greatest number as text ("3 to 5"), or one number if all are equal."""
    least, most = int(numbers.min()), int(numbers.max())
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def sum_by_reader(values: Counts, ranks: int, readers: int) -> Counts:
    """Add up one value of each shard, [shards], over the shards of each reader; return the sums, [ranks, readers]."""
    padded = np.pad(values, (0, -len(values) % (ranks * readers)))
    return np.asarray(padded.reshape(-1, readers, ranks).sum(axis=0).T)


@dataclass(frozen=True, eq=False)
class StreamPlan:
    """The batches that the loaders of all ranks give.

    Raises UserError if a reader would have no samples, where webdataset raises "No samples found in dataset".
    """

    request: PlanRequest  # numbers of nodes, ranks and workers, and the loaders' options
    counts: Counts  # [shards] samples of each shard, in the order of the list of shards
    sizes: Counts | None = None  # [shards] bytes of each shard; None if unknown

    def __post_init__(self) -> None:
        shards, ranks, readers = len(self.counts), self.request.total_ranks, self.request.readers_per_rank
        if shards < ranks * readers:
            fix = f"at most {shards // ranks} workers" if shards >= ranks else f"at most {shards:,} ranks"
            where = f"{shards:,} shards for ranks x workers = {ranks:,} x {readers}"
            raise UserError(f"{where}: {NO_SAMPLES}; take {fix}, or at least {ranks * readers:,} shards")
        for rank, reader in np.argwhere(self.samples == 0):
            where = f"all shards of rank {rank}'s worker {reader} are empty"
            raise UserError(f"{where}: {NO_SAMPLES}; leave out empty shards, or take fewer workers")

    @cached_property
    def samples(self) -> Counts:
        """Samples in the shards of each reader, [ranks, readers]."""
        return sum_by_reader(self.counts, self.request.total_ranks, self.request.readers_per_rank)

    @cached_property
    def batches_per_pass(self) -> Counts:
        """Batches of each rank when every reader reads its shards once, [ranks]."""
        batch_size = self.request.batch_size
        reader_batches = -(-self.samples // batch_size) if self.request.partial else self.samples // batch_size
        return np.asarray(reader_batches.sum(axis=1))

    @cached_property
    def batches(self) -> Counts:
        """Batches of each rank in an epoch, [ranks]."""
        batches = self.request.repeat * self.request.dsrepeat * self.batches_per_pass
        return np.minimum(batches, self.request.nbatches) if self.request.nbatches else batches

    @property
    def hangs(self) -> bool:
        """Whether ranks get different numbers of batches, so that DDP would wait forever."""
        return bool(self.batches.min() != self.batches.max())

    def replace_options(self, **options: Any) -> StreamPlan:
        """Return a plan of the same shards with other options; raise UserError if a reader would have no samples."""
        return StreamPlan(replace(self.request, **options), self.counts)

    def suggest_options(self) -> list[dict[str, int]]:
        """Return changes of options, such as {"workers": 3}; each gives all ranks the same number of batches.

        These are: the largest ``nbatches`` that every rank reaches; the most batches of a rank as ``nbatches``, with
        the smallest ``dsrepeat`` with which all reach them; the nearest ``workers`` below and above, up to twice as
        many; the nearest ``shards`` below and above that readers share evenly, if all shards have as many samples.
        """
        least, most = int(self.batches.min()), int(self.batches.max())
        changes = [{"nbatches": least}] if least else []
        if shortest := self.request.repeat * int(self.batches_per_pass.min()):
            changes.append({"nbatches": most, "dsrepeat": -(-most // shortest)})
        readers, shards, divisor = self.request.readers_per_rank, len(self.counts), self.samples.size
        for nearby in (range(readers - 1, 0, -1), range(readers + 1, 2 * readers + 1)):
            changes += [{"workers": workers} for workers in nearby if self.avoids_hang(workers)][:1]
        even_numbers = {shards // divisor * divisor, -(-shards // divisor) * divisor} - {0}
        return changes + [{"shards": number} for number in sorted(even_numbers)]

    def avoids_hang(self, workers: int) -> bool:
        """Return whether all ranks would get the same number of batches, at least one, with this number of workers."""
        with suppress(UserError):
            plan = self.replace_options(workers=workers)
            return not plan.hangs and bool(plan.batches.any())
        return False

    @property
    def advice(self) -> str:
        """The suggested changes of options as a phrase for an error."""
        ways = [" with ".join(f"{name}={number}" for name, number in way.items()) for way in self.suggest_options()]
        return f"take {', or '.join(ways)} (of shards with equal numbers of samples)"

    def refuse_hang(self) -> None:
        """Raise UserError, with suggested options, if ranks get different numbers of batches or none gets a batch."""
        if not self.batches.any():
            problem = f"no worker has more than {self.samples.max():,} samples, and smaller batches are dropped"
            fix = "lower batch_size or workers, or keep partial batches"
            raise UserError(f"batch_size={self.request.batch_size}: {problem}; {fix}")
        if self.hangs:
            batches = format_range(self.batches)
            raise UserError(f"the ranks get {batches} batches: DDP hangs unless all get the same number; {self.advice}")

    def format_lines(self, limit: int = 8) -> Iterator[str]:
        """Yield the plan as lines of text: the first ``limit`` ranks, nodes' bytes, whether DDP would hang, advice."""
        request, samples = self.request, self.samples.sum(axis=1)
        workers = f"nodes x ranks x workers = {request.nodes:,} x {request.ranks:,} x {request.workers:,}"
        shards = f"{len(self.counts):,} shards with {samples.sum():,} samples"
        yield f"{shards}; {workers}; batches of {request.batch_size:,}"
        row = "{:>6}{:>10}{:>14}{:>11}".format
        yield row("rank", "shards", "samples", "batches")
        for rank in range(min(limit, request.total_ranks)):
            own = len(range(rank, len(self.counts), request.total_ranks))
            yield row(rank, f"{own:,}", f"{samples[rank]:,}", f"{self.batches[rank]:,}")
        if (others := self.batches[limit:]).size:
            yield f"and {others.size:,} more with {format_range(others)} batches each"
        if self.sizes is not None:
            node_bytes = sum_by_reader(self.sizes, request.total_ranks, 1).reshape(request.nodes, -1).sum(axis=1)
            yield f"bytes of a node's shards: {format_range(node_bytes)}"
        if self.hangs:
            yield f"DDP would hang, as ranks get different numbers of batches; {self.advice}"
        elif self.batches.any():
            yield f"every rank gets {self.batches[0]:,} batches"
        else:
            yield "no rank gets a batch: every worker has fewer samples than one takes"
        if request.partial and (self.samples % request.batch_size).any():
            yield "some batches are partial: where ranks' batches differ in size, DDP weighs samples unequally"
