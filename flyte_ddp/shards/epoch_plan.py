"""What each node and rank does in an epoch of training from shards, computed from the index alone.

Here, other than with streams (:mod:`flyte_ddp.shards.stream_plan`), all ranks get the same number of batches and every
sample comes once (or as often as the weight of its part says), whatever the numbers; what there is to plan is how much
each node reads and has to keep.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flyte_ddp import sampling
from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError
from flyte_ddp.shard_order import ShardOrder, ShardSplits, WholeShardSplits, lanes_of_rank
from flyte_ddp.shards.stream_plan import Bounds
from flyte_ddp.shards.stream_readers import Gang


@dataclass(frozen=True, kw_only=True, eq=False)
class EpochPlan:
    """An epoch of training, the same in length as all others.

    Args:
        gang: nodes and ranks.
        batch_size: samples of a global batch.
        samples: in an epoch.
        steps: global batches of an epoch; each rank has a share of every one.
        ragged: samples in the last one, if it is smaller; else 0.
        shards: that each node reads in the planned epoch, [nodes].
        bytes_read: by each node in the planned epoch, [nodes], each shard once; None if the sizes are not known.
        bytes_cached: that each node should have room for, so that training fetches no shard twice, [nodes]; None
            likewise.
        bytes_evaluated: that an evaluation reads from on each node, as it holds out a part of each shard, [nodes].

    """

    gang: Gang
    batch_size: int
    samples: int
    steps: int
    ragged: int
    shards: NDArray[np.int64]
    bytes_read: NDArray[np.int64] | None
    bytes_cached: NDArray[np.int64] | None
    bytes_evaluated: NDArray[np.int64] | None = None
    weighted: bool = False

    def share(self, rank: int) -> int:
        """How many samples of an epoch a rank gets."""
        full = self.samples // self.batch_size
        each, last = (sampling.share_length(length, rank, self.gang.ranks) for length in (self.batch_size, self.ragged))
        return full * each + last

    def describe(self) -> str:
        """The plan for people."""
        gang, ranks = self.gang, self.gang.ranks
        shares = Bounds(self.share(ranks - 1), self.share(0))
        rows = {
            "ranks": f"{gang.nodes:,} nodes x {gang.ranks_per_node:,} = {ranks:,}",
            "steps an epoch": f"{self.steps:,} on every rank"
            + (f", the last of {self.ragged:,} samples" if self.ragged else ""),
            "samples": f"{self.samples:,} an epoch; {shares} a rank",
            "dropped, repeated": "as the weights say" if self.weighted else "none, each sample comes once",
            "shards a node": f"{Bounds(self.shards.min(), self.shards.max())} of an epoch",
        }
        rows_of_bytes = {
            "bytes read": self.bytes_read,
            "cache wanted": self.bytes_cached,
            "an evaluation": self.bytes_evaluated,
        }
        for what, numbers in rows_of_bytes.items():
            if numbers is not None and numbers.any():
                rows[what] = f"{Bounds(numbers.min(), numbers.max())} bytes a node"
        if any(" to " in value for value in rows.values()):
            rows["a range"] = "from the rank or node with the least to the one with the most"
        if self.bytes_evaluated is not None and not self.bytes_evaluated.all() and self.bytes_evaluated.any():
            rows[""] = "an evaluation has few batches, and deals them out whole, so that a node may get none"
        return "\n".join(f"{name:<18} {value}" for name, value in rows.items())


def plan_epoch(
    order: ShardOrder,
    sizes: NDArray[np.int64] | None,
    gang: Gang,
    batch_size: int,
    epoch: int = 0,
    *,
    accumulation_steps: int = 1,
    test_batch_size: int = 250,
) -> EpochPlan:
    """Computes what each node reads in an epoch.

    Args:
        order: the order of training.
        sizes: bytes of each shard, [shards]; None if they are not known.
        gang: nodes and ranks.
        batch_size: samples of a global batch, over all ranks.
        epoch: which one.
        accumulation_steps, test_batch_size: as the hyperparameters.

    Raises:
        UserError: there are no samples, or fewer in a batch than there are ranks.
    """
    if not len(order):
        raise UserError("the shards have no samples for training; lower validation_fraction, or take other shards")
    if batch_size < gang.ranks:
        raise UserError(
            f"batch_size={batch_size}: must be at least the number of ranks, {gang.ranks:,}, so that each has a "
            "sample; raise it or take fewer ranks"
        )
    ragged, found = ragged_shards(order, batch_size, gang, epoch), []
    for node in range(gang.nodes):
        shards = np.unique(np.concatenate([*shards_of(order, batch_size, gang, node, epoch), ragged[node]]))
        found.append((len(shards), 0 if sizes is None else int(sizes[shards].sum())))
    counts, read = (np.array(column, dtype=np.int64) for column in zip(*found, strict=True))
    parts = min(accumulation_steps, batch_size)
    wanted = 0 if sizes is None else cache_wanted(sizes, gang, order.lanes, parts)
    return EpochPlan(
        gang=gang,
        batch_size=batch_size,
        samples=len(order),
        steps=sampling.steps_per_epoch(len(order), batch_size),
        ragged=len(order) % batch_size,
        shards=counts,
        bytes_read=None if sizes is None else read,
        bytes_cached=None if sizes is None else np.minimum(wanted, read),
        bytes_evaluated=None if sizes is None else evaluated(order.splits, sizes, gang, test_batch_size),
        weighted=bool((order.taken != order.available).any()),
    )


def evaluated(
    splits: ShardSplits | WholeShardSplits, sizes: NDArray[np.int64], gang: Gang, batch_size: int
) -> NDArray[np.int64]:
    """[nodes] bytes of the shards that an evaluation needs on each node, which has a stretch of each split."""
    total = np.zeros(gang.nodes, dtype=np.int64)
    for split in ("validation", "test"):
        ends = np.cumsum(splits.sizes[split])
        batches = -(-int(ends[-1]) // batch_size)
        for node in range(gang.nodes):
            first, last = (first_place(batches, rank * gang.ranks_per_node, gang.ranks) for rank in (node, node + 1))
            start, end = first * batch_size, min(last * batch_size, int(ends[-1]))
            if start < end:
                needed = slice(np.searchsorted(ends, start, "right"), np.searchsorted(ends, end - 1, "right") + 1)
                total[node] += int(sizes[needed][splits.sizes[split][needed] > 0].sum())
    return total


def cache_wanted(sizes: NDArray[np.int64], gang: Gang, lanes: int, parts: int = 1) -> int:
    """Bytes that a node should have room for at the most, so that training fetches no shard twice in an epoch.

    That is for the shards of the lanes that each rank reads from, and as many that may be on their way.
    """
    return 2 * gang.ranks_per_node * lanes_of_rank(lanes, gang.ranks, parts) * int(sizes.max())


def shards_of(order: ShardOrder, batch_size: int, gang: Gang, node: int, epoch: int) -> Iterator[NDArray[np.int64]]:
    """The shards that a node reads for the full batches of an epoch, lane by lane."""
    full = len(order) // batch_size
    first, last = (first_place(batch_size, rank * gang.ranks_per_node, gang.ranks) for rank in (node, node + 1))
    starts, each = order.lane_starts(batch_size)
    ends = np.cumsum(each)  # of the lanes' parts in a full batch
    own = range(int(np.searchsorted(ends, first, "right")), int(np.searchsorted(ends, last - 1, "right")) + 1)
    for lane in own if full else ():
        part, before = int(each[lane]), int(ends[lane] - each[lane])
        of_node = (max(first - before, 0), min(last - before, part))
        stretch = (int(starts[lane]), int(starts[lane]) + full * part)
        yield touched(order, epoch, stretch, part, of_node)


def ragged_shards(order: ShardOrder, batch_size: int, gang: Gang, epoch: int) -> list[NDArray[np.int64]]:
    """[nodes] the shards that each node reads for a last batch that is smaller than the others."""
    full, ragged = divmod(len(order), batch_size)
    samples = order.batch(epoch, batch_size, full) if ragged else np.empty(0, dtype=np.int64)
    shards = np.searchsorted(np.cumsum(order.splits.counts), samples, side="right")
    cuts = [first_place(ragged, node * gang.ranks_per_node, gang.ranks) for node in range(gang.nodes + 1)]
    return [shards[start:end] for start, end in itertools.pairwise(cuts)]


def touched(
    order: ShardOrder, epoch: int, stretch: tuple[int, int], each: int, part: tuple[int, int]
) -> NDArray[np.int64]:
    """The shards of a stretch of the epoch's sequence from which that part of every ``each`` samples is taken."""
    (start, end), (low, high) = stretch, part
    shards, ends = order.sequence(epoch)
    places = slice(np.searchsorted(ends, start, side="right"), np.searchsorted(ends, end - 1, side="right") + 1)
    begins = np.maximum(ends[places] - order.taken[shards[places]], start) - start
    lengths = np.minimum(ends[places], end) - start - begins
    phases = begins % each
    # Either all phases come up in the shard, or those from the first one on, beyond `each` as well.
    here = (phases < high) & (phases + lengths > low)
    later = phases + lengths > each + low
    chosen: NDArray[np.int64] = shards[places][(lengths >= each) | here | later]
    return chosen


def first_place(batch_size: int, rank: int, ranks: int) -> int:
    """Where in a batch the share of a rank begins."""
    return rank * (batch_size // ranks) + min(rank, batch_size % ranks)


def plan_training(
    counts: NDArray[np.int64],
    sizes: NDArray[np.int64] | None,
    weights: NDArray[np.float64],
    gang: Gang,
    hp: Hyperparameters,
    *,
    test_fraction: float,
) -> EpochPlan:
    """:func:`plan_epoch` of a training with these hyperparameters.

    Args:
        counts, sizes, weights: [shards] samples; bytes, None if they are not known; weights of their parts.
        test_fraction: held out for testing; 0 where there is a ``test_dataset``.

    Raises:
        UserError: there are no samples, or fewer in a batch than there are ranks; a fraction that is none.
    """
    if not 0 <= test_fraction < 1:
        raise UserError(f"test_fraction={test_fraction}: must be at least 0 and below 1")
    splits = ShardSplits(counts, hp.validation_fraction, test_fraction, hp.seed)
    order = ShardOrder(splits, "training", weights, hp.seed, hp.shuffle_shards)
    return plan_epoch(
        order,
        sizes,
        gang,
        hp.batch_size,
        accumulation_steps=hp.accumulation_steps,
        test_batch_size=hp.test_batch_size,
    )
