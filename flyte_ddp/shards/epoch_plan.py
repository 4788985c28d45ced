"""What each node and rank does in an epoch of training from shards, computed from the index alone.

Here, other than with streams (:mod:`flyte_ddp.shards.stream_plan`), all ranks get the same number of batches and every
sample comes once (or as often as the weight of its part says), whatever the numbers; what there is to plan is how much
each node reads and has to keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError
from flyte_ddp.order import sampling
from flyte_ddp.order.shard_order import ShardOrder, streams_of_rank

Counts = NDArray[np.int64]


def least_to_most(numbers: Counts) -> str:
    """The range of numbers; the number itself where all are equal."""
    least, most = int(numbers.min()), int(numbers.max())
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The nodes of a run and their ranks; those of a node are consecutive.

    Raises:
        UserError: a number is below 1.
    """

    nodes: int = 1
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: must be at least 1")

    @property
    def ranks(self) -> int:
        """In all."""
        return self.nodes * self.ranks_per_node

    def places(self, node: int, items: int) -> tuple[int, int]:
        """Where the shares of a node's ranks begin and end in so many items, of which each rank has a slice."""
        first, last = node * self.ranks_per_node, (node + 1) * self.ranks_per_node
        return sampling.share_start(items, first, self.ranks), sampling.share_start(items, last, self.ranks)


@dataclass(frozen=True, kw_only=True, eq=False)
class EpochPlan:
    """An epoch of training, the same in length as all others.

    Args:
        cluster: nodes and ranks.
        batch_size: samples of a global batch.
        samples: in an epoch.
        weighted: whether some samples come more often than others.
        shards: that each node reads in the planned epoch, [nodes].
        bytes_read: by each node in the planned epoch, [nodes], each shard once; None if the sizes are not known.
        bytes_cached: that a node's cache must hold so that training fetches no shard twice, [nodes]; None likewise.
    """

    cluster: Cluster
    batch_size: int
    samples: int
    weighted: bool
    shards: Counts
    bytes_read: Counts | None = None
    bytes_cached: Counts | None = None

    @property
    def steps(self) -> int:
        """Global batches of an epoch; each rank has a share of every one."""
        return sampling.steps_per_epoch(self.samples, self.batch_size)

    def share(self, rank: int) -> int:
        """How many samples of an epoch a rank gets."""
        full, ragged = divmod(self.samples, self.batch_size)
        each, last = (sampling.share_length(length, rank, self.cluster.ranks) for length in (self.batch_size, ragged))
        return full * each + last

    def describe(self) -> str:
        """The plan for people."""
        cluster, ranks, ragged = self.cluster, self.cluster.ranks, self.samples % self.batch_size
        last = f", the last of {ragged:,} samples" if ragged else ""
        shares = np.array([self.share(ranks - 1), self.share(0)])
        rows = {
            "ranks": f"{cluster.nodes:,} nodes x {cluster.ranks_per_node:,} = {ranks:,}",
            "steps an epoch": f"{self.steps:,} on every rank{last}",
            "samples": f"{self.samples:,} an epoch; {least_to_most(shares)} a rank",
            "dropped, repeated": "as the weights say" if self.weighted else "none, each sample comes once",
            "shards a node": f"{least_to_most(self.shards)} of an epoch",
        }
        for what, numbers in {"bytes read": self.bytes_read, "cache wanted": self.bytes_cached}.items():
            if numbers is not None:
                rows[what] = f"{least_to_most(numbers)} bytes a node"
        if any(" to " in value for value in rows.values()):
            rows["a range"] = "from the rank or node with the least to the one with the most"
        return "\n".join(f"{name:<18} {value}" for name, value in rows.items())


def plan_epoch(order: ShardOrder, sizes: Counts | None, cluster: Cluster, hp: Hyperparameters) -> EpochPlan:
    """Computes what each node reads in the first epoch.

    Args:
        order: the order of training.
        sizes: bytes of each shard, [shards]; None if they are not known.
        cluster: nodes and ranks.
        hp: with ``batch_size`` and ``accumulation_steps``.
    """
    batch_size = hp.batch_size
    if not len(order):
        raise UserError("the shards have no samples for training; lower validation_fraction, or take other shards")
    if batch_size < cluster.ranks:
        raise UserError(
            f"batch_size={batch_size}: must be at least the number of ranks, {cluster.ranks:,}, so that each has a "
            "sample; raise it or take fewer ranks"
        )
    ragged = ragged_shards(order, batch_size, cluster)
    read = [
        np.unique(np.concatenate([*shards_of(order, batch_size, cluster, node), ragged[node]]))
        for node in range(cluster.nodes)
    ]
    plan = EpochPlan(
        cluster=cluster,
        batch_size=batch_size,
        samples=len(order),
        weighted=bool((order.taken != order.available).any()),
        shards=np.array([len(shards) for shards in read]),
    )
    if sizes is None:
        return plan
    bytes_read = np.array([sizes[shards].sum() for shards in read])
    wanted = cache_wanted(sizes, cluster, order.shuffle_streams, min(hp.accumulation_steps, batch_size))
    return replace(plan, bytes_read=bytes_read, bytes_cached=np.minimum(wanted, bytes_read))


def cache_wanted(sizes: Counts, cluster: Cluster, shuffle_streams: int, parts: int = 1) -> int:
    """Bytes that a node's cache must hold at the most, so that training fetches no shard twice in an epoch.

    That is for the shards of the shuffle streams that each rank reads, and as many that may be on their way.
    """
    of_rank = streams_of_rank(shuffle_streams, cluster.ranks, parts)
    return 2 * cluster.ranks_per_node * of_rank * int(sizes.max())


def shards_of(order: ShardOrder, batch_size: int, cluster: Cluster, node: int) -> Iterator[Counts]:
    """The shards that a node reads for the full batches of the first epoch, by shuffle streams."""
    full = len(order) // batch_size
    first, last = cluster.places(node, batch_size)
    starts, each = order.stream_starts(batch_size)
    ends = np.cumsum(each)  # of the streams' parts in a full batch
    own = range(int(np.searchsorted(ends, first, "right")), int(np.searchsorted(ends, last - 1, "right")) + 1)
    for stream in own if full else ():
        part, before = int(each[stream]), int(ends[stream] - each[stream])
        of_node = (max(first - before, 0), min(last - before, part))
        stretch = (int(starts[stream]), int(starts[stream]) + full * part)
        yield touched(order, stretch, part, of_node)


def ragged_shards(order: ShardOrder, batch_size: int, cluster: Cluster) -> list[Counts]:
    """[nodes] the shards that each node reads for a last batch that is smaller than the others."""
    full, ragged = divmod(len(order), batch_size)
    samples = order.batch(0, batch_size, full) if ragged else np.empty(0, dtype=np.int64)
    shards = np.searchsorted(np.cumsum(order.splits.counts), samples, side="right")
    return [shards[slice(*cluster.places(node, ragged))] for node in range(cluster.nodes)]


def touched(order: ShardOrder, stretch: tuple[int, int], each: int, part: tuple[int, int]) -> Counts:
    """The shards of a stretch of the epoch's sequence from which that part of every ``each`` samples is taken."""
    (start, end), (low, high) = stretch, part
    shards, ends = order.sequence(0)
    places = slice(np.searchsorted(ends, start, side="right"), np.searchsorted(ends, end - 1, side="right") + 1)
    begins = np.maximum(ends[places] - order.taken[shards[places]], start) - start
    lengths = np.minimum(ends[places], end) - start - begins
    phases = begins % each
    # Either all phases come up in the shard, or those from the first one on, beyond `each` as well.
    here = (phases < high) & (phases + lengths > low)
    later = phases + lengths > each + low
    chosen: Counts = shards[places][(lengths >= each) | here | later]
    return chosen
