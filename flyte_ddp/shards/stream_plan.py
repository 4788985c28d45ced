"""Compute the number of batches that each rank gets from webdataset. If the numbers differ, DDP hangs."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.errors import UserError

NO_SAMPLES = "webdataset fails in a worker without samples"


@dataclass(frozen=True)
class Loaders:
    """The options of ``simdist.py`` (tmbdev-archive/wds-distributed), with the same names."""

    ranks: int
    workers: int = 0  # of each rank, or 0 to read in the rank's process
    batch_size: int = 1  # of each rank
    nbatches: int = 0  # number of batches after which a rank stops, or 0 for no limit
    partial: bool = False  # whether incomplete batches are kept
    repeat: int = 1  # passes of a rank's loader
    dsrepeat: int = 1  # passes of a worker over its shards


class StreamPlan:
    """The numbers of batches that ranks get. ``simdist.py`` counts the same numbers by running all loaders.

    Shard ``i`` goes to rank ``i % ranks``, and in this rank to worker ``i // ranks % workers``. Each worker cuts its
    samples into batches, ``dsrepeat`` times. A rank gets the batches of all its workers, ``repeat`` times, and stops
    after ``nbatches`` (webdataset 1.0.2).

    Raises:
        UserError: A worker would have no samples. webdataset fails in the same case.
    """

    def __init__(self, loaders: Loaders, counts: NDArray[np.int64]) -> None:
        """Compute the plan.

        ``counts`` [shards] holds the number of samples of each shard, in the order of the shards.

        Raises:
            UserError: A worker of a rank gets no sample.
        """
        ranks, workers = loaders.ranks, max(1, loaders.workers)
        if len(counts) < ranks * workers:
            fix = f"use fewer ranks or workers, or at least {ranks * workers:,} shards"
            few = f"{len(counts):,} shards for ranks x workers = {ranks:,} x {workers}"
            raise UserError(f"{few}: {NO_SAMPLES}; {fix}")
        padded = np.pad(counts, (0, -len(counts) % (ranks * workers)))
        self.loaders, self.counts = loaders, counts
        self.samples = padded.reshape(-1, workers, ranks).sum(axis=0).T  # [ranks, workers]
        for rank, worker in np.argwhere(self.samples == 0):
            where = f"all shards of rank {rank}'s worker {worker} are empty"
            raise UserError(f"{where}: {NO_SAMPLES}; remove empty shards, or use fewer workers")
        size = loaders.batch_size
        self.pass_batches = (-(-self.samples // size) if loaders.partial else self.samples // size).sum(axis=1)
        batches = loaders.repeat * loaders.dsrepeat * self.pass_batches
        self.batches = np.minimum(batches, loaders.nbatches) if loaders.nbatches else batches  # [ranks]

    @property
    def is_exact(self) -> bool:
        """Return whether all ranks get the same number of batches, and at least one."""
        return bool(self.batches.min() == self.batches.max() > 0)

    def suggest_option_changes(self) -> list[dict[str, int]]:
        """Return changes of options, each of which gives all ranks the same number of batches.

        Returns:
            A list of changes, such as {"nbatches": 3}. The list is empty if no change of these options helps.
        """
        least, most = int(self.batches.min()), int(self.batches.max())
        changes = [{"nbatches": least}] if least else []
        if shortest := self.loaders.repeat * int(self.pass_batches.min()):
            changes.append({"nbatches": most, "dsrepeat": -(-most // shortest)})
        return changes

    def describe_in_lines(self, limit: int = 8) -> Iterator[str]:
        """Yield the plan as lines of text: a header, the first ``limit`` ranks, and a summary of the other ranks.

        If all ranks get the same number of batches, the last line is this number.
        """
        loaders, samples = self.loaders, self.samples.sum(axis=1)
        yield (
            f"{len(self.counts):,} shards with {samples.sum():,} samples; ranks x workers = {loaders.ranks:,} x "
            f"{loaders.workers:,}; batches of {loaders.batch_size:,}"
        )
        for rank in range(min(limit, loaders.ranks)):
            yield f"rank {rank}: {samples[rank]:,} samples, {self.batches[rank]:,} batches"
        if (others := self.batches[limit:]).size:
            yield f"and {others.size:,} more ranks with {others.min():,} to {others.max():,} batches each"
        if self.is_exact:
            yield f"every rank gets {self.batches[0]:,} batches"

    def require_equal_batch_counts(self) -> None:
        """Raise UserError if ranks get different numbers of batches, or if no rank gets a batch.

        The error suggests options.
        """
        if not self.batches.any():
            problem = f"no worker has more than {self.samples.max():,} samples, and smaller batches are dropped"
            fix = "lower batch_size or workers, or keep partial batches"
            raise UserError(f"batch_size={self.loaders.batch_size}: {problem}; {fix}")
        if not self.is_exact:
            ways = [
                " with ".join(f"{name}={number}" for name, number in way.items())
                for way in self.suggest_option_changes()
            ]
            ways.append(f"a multiple of {self.samples.size:,} equal shards")
            problem = f"the ranks get {self.batches.min():,} to {self.batches.max():,} batches"
            raise UserError(f"{problem}: DDP hangs unless all ranks get the same number; use {', or '.join(ways)}")
