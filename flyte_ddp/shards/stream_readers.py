"""How ranks read shards as streams, and what each reader gets and gives: pure functions on arrays.

A reader is a worker of a rank's loader, or the rank's own process where the loader has no workers. Shards go round the
ranks, and each rank's shards round its readers: shard ``i`` to rank ``i % ranks``, reader ``i // ranks % readers``. A
reader cuts its samples into batches, pass by pass, and the loader takes one batch of each reader in turn, leaving out
those that have ended; that is the order of torch's DataLoader, whatever the workers' speed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.errors import UserError

Counts = NDArray[np.int64]


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
        """Checks the numbers."""
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
class Gang:
    """The ranks of a run; those of a node are consecutive.

    Raises:
        UserError: a number is below 1.

    """

    nodes: int = 1
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        """Checks the numbers."""
        for name in ("nodes", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: must be at least 1")

    @property
    def ranks(self) -> int:
        """In all."""
        return self.nodes * self.ranks_per_node


def reader_shards(rank: int, reader: int, ranks: int, readers: int, shards: int) -> range:
    """A reader's shards, in the order in which it opens them."""
    return range(rank + ranks * reader, shards, ranks * readers)


def by_reader(values: Counts, ranks: int, readers: int) -> Counts:
    """Sums over each reader's shards: [shards] to [ranks, readers]."""
    rounds = -(-len(values) // (ranks * readers))
    padded = np.zeros(rounds * ranks * readers, dtype=np.int64)
    padded[: len(values)] = values
    return np.asarray(padded.reshape(rounds, readers, ranks).sum(axis=0).T)


def first_batches(counts: Counts, taken: Counts) -> Counts:
    """How many of a rank's first batches come from each of its readers.

    Args:
        counts: batches that each reader has, [ranks, readers].
        taken: how many of them the loader takes, [ranks]; no more than there are.

    Returns:
        The readers' parts of these, [ranks, readers].

    """
    readers = counts.shape[1]
    ends = np.pad(np.sort(counts, axis=1), ((0, 0), (1, 0)))  # rounds after which 0, 1, 2 ... readers have ended
    # Batches dealt until then: between two ends, each round deals one for each reader that is left.
    dealt = np.pad(np.cumsum(np.diff(ends, axis=1) * np.arange(readers, 0, -1), axis=1), ((0, 0), (1, 0)))
    ended = (dealt[:, 1:] < taken[:, None]).sum(axis=1, keepdims=True)
    since = taken[:, None] - np.take_along_axis(dealt, ended, axis=1)
    rounds = np.take_along_axis(ends, ended, axis=1) + since // (readers - ended)
    parts = np.minimum(counts, rounds)
    # What is left of the last round goes to the first of those that are not at their end.
    running = counts > rounds
    left = taken - parts.sum(axis=1)
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


def checked(values: Counts, name: str, shards: int | None = None) -> Counts:
    """The numbers of shards as an array of their own, or UserError."""
    array = np.array(values, dtype=np.int64)
    if not len(array):
        raise UserError(f"{name} of no shards: a stream needs at least one for each worker of each rank")
    if shards is not None and len(array) != shards:
        raise UserError(f"{name} of {len(array):,} shards: must be of all {shards:,}, or not given")
    if (negative := np.flatnonzero(array < 0)).size:
        raise UserError(f"{name}={array[negative[0]]} of shard {negative[0]}: must be at least 0")
    return array


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


def begun_passes(in_pass: Counts, in_cut: Counts, whole: Counts, rest: Counts, dsrepeat: int) -> Counts:
    """Passes that each reader begins, [ranks, readers].

    Args:
        in_pass: batches of a reader's pass, [ranks, readers].
        in_cut: batches that are taken from it in the loader's last pass, if that is cut off, [ranks, readers].
        whole: passes of the loader that are not cut off, [ranks].
        rest: batches of the one that is, [ranks].
        dsrepeat: passes of a reader in one of the loader's.

    """
    # All workers start to read when a pass of the loader begins, even those whose turn does not come. And webdataset
    # repeats nothing that has given nothing: neither a worker without a batch nor a loader without one.
    last = np.maximum(-(-in_cut // np.maximum(in_pass, 1)), 1) * (rest > 0)[:, None]
    return np.asarray(np.maximum(whole[:, None] * np.where(in_pass > 0, dsrepeat, 1) + last, 1))
