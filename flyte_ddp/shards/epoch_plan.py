"""What each node and rank does in an epoch of training from shards, computed from the index alone.

All ranks get the same number of batches and every sample comes once (or as often as the weight of its part says). So
the plan is of what each node reads and has to keep. A stream (:mod:`flyte_ddp.shards.stream_plan`) deals whole shards
to ranks instead, by webdataset's rules, and its plan is of the batches that ranks get.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flyte_ddp.errors import UserError
from flyte_ddp.order import sampling
from flyte_ddp.order.shard_order import ShardOrder, shares, streams_of_rank
from flyte_ddp.shards.plan_request import PlanRequest
from flyte_ddp.shards.stream_plan import Counts, format_range


def cache_wanted(sizes: Counts, shuffle_streams: int, parts: int, *, ranks: int, nodes: int = 1) -> int:
    """Return the bytes that a node's cache must hold at the most, so that training fetches no shard twice in an epoch.

    That is room for the shards of the shuffle streams that each rank reads, and as many that may be on their way.

    Args:
        sizes: bytes of each shard, [shards].
        shuffle_streams: shuffle streams of a batch.
        parts: micro-batches that a batch is cut into.
        ranks: ranks of each node, which share its cache.
        nodes: the number of nodes.
    """
    return 2 * ranks * streams_of_rank(shuffle_streams, nodes * ranks, parts) * int(sizes.max())


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """An epoch of training, the same in length as all others; what is read is that of the first one.

    Args:
        request: the numbers of nodes and ranks, ``batch_size`` and ``accumulation_steps``.
        order: the order of training.
        sizes: bytes of each shard, [shards]; None if they are not known.

    Raises:
        UserError: there are no samples, or fewer in a batch than ranks.
    """

    request: PlanRequest
    order: ShardOrder
    sizes: Counts | None

    def __post_init__(self) -> None:
        ranks = self.request.all_ranks
        if not len(self.order):
            raise UserError("the shards have no samples for training; lower validation_fraction, or take other shards")
        if self.request.batch_size < ranks:
            raise UserError(
                f"batch_size={self.request.batch_size}: must be at least the number of ranks, {ranks:,}, so that each "
                "has a sample; raise it or take fewer ranks"
            )

    @property
    def steps(self) -> int:
        """Global batches of an epoch; each rank has a share of every one."""
        return sampling.steps_per_epoch(len(self.order), self.request.batch_size)

    def share(self, rank: int) -> int:
        """Return how many samples of an epoch a rank gets."""
        full, ragged = divmod(len(self.order), self.request.batch_size)
        each, last = (shares(size, self.request.all_ranks)[rank] for size in (self.request.batch_size, ragged))
        return int(full * each + last)

    @cached_property
    def shards_read(self) -> list[Counts]:
        """[nodes] the numbers of the shards that each node reads."""
        full, ragged = divmod(len(self.order), self.request.batch_size)
        starts, each = self.order.stream_starts(self.request.batch_size)
        shards, ends = self.order.sequence(0)
        # Of each kind of batch: samples of each stream, and the first batch and the one after the last.
        kinds = [(each, 0, full), (shares(ragged, len(each)), full, full + 1)]
        found = []
        for node in range(self.request.nodes):
            entered = np.zeros(len(shards) + 1, dtype=np.int64)  # by how many stretches more than are left before it
            for lengths, first_batch, end_batch in kinds:
                ranks = node * self.request.ranks, (node + 1) * self.request.ranks
                first, last = (sampling.share_start(int(lengths.sum()), rank, self.request.all_ranks) for rank in ranks)
                before = np.cumsum(lengths) - lengths
                low, high = np.clip(first - before, 0, lengths), np.clip(last - before, 0, lengths)
                own = np.flatnonzero(high > low)  # streams that the node's share of a batch overlaps
                begins = starts[own, None] + each[own, None] * np.arange(first_batch, end_batch)
                for places, change in ((begins + low[own, None], 1), (begins + high[own, None] - 1, -1)):
                    numbers = np.searchsorted(ends, places.ravel(), side="right") + (change < 0)
                    entered += change * np.bincount(numbers, minlength=len(entered))
            found.append(np.sort(shards[np.cumsum(entered)[:-1] > 0]))
        return found

    @cached_property
    def bytes_read(self) -> Counts | None:
        """[nodes] bytes of the shards that each node reads, each shard once; None if the sizes are not known."""
        sizes = self.sizes
        return None if sizes is None else np.array([sizes[shards].sum() for shards in self.shards_read])

    def describe(self) -> Iterator[str]:
        """Yield the plan's lines."""
        request, samples, ranks = self.request, len(self.order), self.request.all_ranks
        ragged = samples % request.batch_size
        weighted = (self.order.taken != self.order.available).any()
        rank_shares = np.array([self.share(ranks - 1), self.share(0)])
        rows = {
            "ranks": f"{request.nodes:,} nodes x {request.ranks:,} = {ranks:,}",
            "steps an epoch": f"{self.steps:,} on every rank" + (f", the last of {ragged:,} samples" if ragged else ""),
            "samples": f"{samples:,} an epoch; {format_range(rank_shares)} a rank",
            "dropped, repeated": "as the weights say" if weighted else "none, each sample comes once",
            "shards a node": f"{format_range(np.array([len(shards) for shards in self.shards_read]))} of an epoch",
        }
        if self.sizes is not None and self.bytes_read is not None:
            parts = min(request.accumulation_steps, request.batch_size)
            streams = self.order.shuffle_streams
            wanted = cache_wanted(self.sizes, streams, parts, ranks=request.ranks, nodes=request.nodes)
            rows["bytes read"] = f"{format_range(self.bytes_read)} bytes a node"
            rows["cache wanted"] = f"{format_range(np.minimum(wanted, self.bytes_read))} bytes a node"
        if any(" to " in value for value in rows.values()):
            rows["a range"] = "from the rank or node with the least to the one with the most"
        return (f"{name:<18} {value}" for name, value in rows.items())
