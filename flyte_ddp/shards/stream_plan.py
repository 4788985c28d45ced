"""Plan of a stream by webdataset's rules, under which ranks may get different numbers of batches, so that DDP hangs."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.errors import UserError

NO_SAMPLES = "webdataset ends with an error in a worker without samples"


@dataclass(frozen=True)
class Loaders:
    """The options of ``simdist.py`` (tmbdev-archive/wds-distributed), by its names."""

    ranks: int
    workers: int = 0  # of each rank; with 0 the rank's own process reads
    batch_size: int = 1  # of each rank
    nbatches: int = 0  # after which a rank stops; 0 for no limit
    partial: bool = False  # whether batches that are not full are kept
    repeat: int = 1  # passes of a rank's loader
    dsrepeat: int = 1  # passes of a worker over its shards


class StreamPlan:
    """The numbers of batches that ranks get, which ``simdist.py`` counts by running all loaders.

    Shard ``i`` goes to rank ``i % ranks``, there to worker ``i // ranks % workers``. Each worker cuts its samples into
    batches, ``dsrepeat`` times. A rank takes the batches of all its workers, ``repeat`` times, and stops after
    ``nbatches`` (webdataset 1.0.2). Raises UserError if a worker would have no samples, as webdataset does.
    """

    def __init__(self, loaders: Loaders, counts: NDArray[np.int64]) -> None:
        """``counts`` [shards] are the samples of each shard, in the order of the list of shards."""
        ranks, workers = loaders.ranks, max(1, loaders.workers)
        if len(counts) < ranks * workers:
            fix = f"take fewer of them, or at least {ranks * workers:,} shards"
            few = f"{len(counts):,} shards for ranks x workers = {ranks:,} x {workers}"
            raise UserError(f"{few}: {NO_SAMPLES}; {fix}")
        padded = np.pad(counts, (0, -len(counts) % (ranks * workers)))
        self.loaders, self.counts = loaders, counts
        self.samples = padded.reshape(-1, workers, ranks).sum(axis=0).T  # [ranks, workers]
        for rank, worker in np.argwhere(self.samples == 0):
            where = f"all shards of rank {rank}'s worker {worker} are empty"
            raise UserError(f"{where}: {NO_SAMPLES}; leave out empty shards, or take fewer workers")
        size = loaders.batch_size
        self.pass_batches = (-(-self.samples // size) if loaders.partial else self.samples // size).sum(axis=1)
        batches = loaders.repeat * loaders.dsrepeat * self.pass_batches
        self.batches = np.minimum(batches, loaders.nbatches) if loaders.nbatches else batches  # [ranks]

    @property
    def is_exact(self) -> bool:
        """Whether all ranks get the same number of batches, and at least one."""
        return bool(self.batches.min() == self.batches.max() > 0)

    def suggest_options(self) -> list[dict[str, int]]:
        """Return changes of options, such as {"nbatches": 3}; each gives all ranks the same number of batches."""
        least, most = int(self.batches.min()), int(self.batches.max())
        changes = [{"nbatches": least}] if least else []
        if shortest := self.loaders.repeat * int(self.pass_batches.min()):
            changes.append({"nbatches": most, "dsrepeat": -(-most // shortest)})
        return changes

    def format_lines(self, limit: int = 8) -> Iterator[str]:
        """Yield a line for each of the first ``limit`` ranks, and whether the plan is exact."""
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

    def refuse_inexact(self) -> None:
        """Raise UserError, with options that are exact, if ranks get different numbers of batches or none gets one."""
        if not self.batches.any():
            problem = f"no worker has more than {self.samples.max():,} samples, and smaller batches are dropped"
            fix = "lower batch_size or workers, or keep partial batches"
            raise UserError(f"batch_size={self.loaders.batch_size}: {problem}; {fix}")
        if not self.is_exact:
            ways = [" with ".join(f"{name}={number}" for name, number in way.items()) for way in self.suggest_options()]
            ways.append(f"a multiple of {self.samples.size:,} equal shards")
            problem = f"the ranks get {self.batches.min():,} to {self.batches.max():,} batches"
            raise UserError(f"{problem}: DDP hangs unless all get the same number; take {', or '.join(ways)}")
