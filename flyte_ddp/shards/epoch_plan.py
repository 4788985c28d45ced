"""Compute which shards each node reads in an epoch of training, and how large its cache should be, from the index.

All ranks get the same number of batches, and each sample comes once (or as often as the weight of its part says). So
the plan tells about reading and caching. :mod:`flyte_ddp.shards.stream_plan` plans streams by webdataset's rules, where
ranks may get different numbers of batches.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flyte_ddp.errors import UserError
from flyte_ddp.order import sampling
from flyte_ddp.order.shard_order import ShardOrder, count_rank_streams, slice_lengths
from flyte_ddp.shards.plan_request import PlanRequest
from flyte_ddp.shards.stream_plan import Counts, format_range


def sufficient_cache_bytes(sizes: Counts, shuffle_streams: int, parts: int, *, ranks: int, nodes: int = 1) -> int:
    """Return the bytes that are always enough for a node's cache, so that training fetches no shard twice in an epoch.

    This is the room for the shards that each rank reads from, and for as many shards that are being fetched.

    Args:
        sizes: bytes of each shard, [shards].
        shuffle_streams: number of shards that a batch is drawn from.
        parts: micro-batches of a batch.
        ranks: ranks on each node; they share its cache.
        nodes: number of nodes.
    """
    return 2 * ranks * count_rank_streams(shuffle_streams, nodes * ranks, parts) * int(sizes.max())


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The reading of the first epoch of training; later epochs have the same length and read other shards.

    Args:
        request: numbers of nodes and ranks, ``batch_size`` and ``accumulation_steps``.
        order: order of the training samples.
        sizes: bytes of each shard, [shards]; None if unknown.

    Raises:
        UserError: there are no samples, or a batch has fewer samples than there are ranks.
    """

    request: PlanRequest
    order: ShardOrder
    sizes: Counts | None

    def __post_init__(self) -> None:
        ranks = self.request.total_ranks
        if not len(self.order):
            raise UserError("the shards have no samples for training; lower validation_fraction, or take other shards")
        if self.request.batch_size < ranks:
            raise UserError(
                f"batch_size={self.request.batch_size}: must be at least the number of ranks, {ranks:,}, so that each "
                "has a sample; raise it or take fewer ranks"
            )

    @property
    def steps(self) -> int:
        """Number of global batches in an epoch; each rank gets a share of every batch."""
        return sampling.steps_per_epoch(len(self.order), self.request.batch_size)

    def samples_of_rank(self, rank: int) -> int:
        """Return how many samples a rank gets in an epoch."""
        full, ragged = divmod(len(self.order), self.request.batch_size)
        each, last = (slice_lengths(size, self.request.total_ranks)[rank] for size in (self.request.batch_size, ragged))
        return int(full * each + last)

    @cached_property
    def shards_read(self) -> list[Counts]:
        """For each node, the sorted numbers of the shards that it reads."""
        full, ragged = divmod(len(self.order), self.request.batch_size)
        starts, each = self.order.stream_starts(self.request.batch_size)
        shards, ends = self.order.sequence(0)
        # Full batches and the last, ragged one: samples from each stream, first batch, batch after the last.
        kinds = [(each, 0, full), (slice_lengths(ragged, len(each)), full, full + 1)]
        node_shards = []
        for node in range(self.request.nodes):
            # For each shard: stretches of the node's samples that begin in it, less those that end in the one before.
            # The cumulative sum is the number of stretches that touch a shard.
            entered = np.zeros(len(shards) + 1, dtype=np.int64)
            for lengths, first_batch, end_batch in kinds:
                ranks = node * self.request.ranks, (node + 1) * self.request.ranks
                first, last = (
                    sampling.slice_start(int(lengths.sum()), rank, self.request.total_ranks) for rank in ranks
                )
                before = np.cumsum(lengths) - lengths
                low, high = np.clip(first - before, 0, lengths), np.clip(last - before, 0, lengths)
                own = np.flatnonzero(high > low)  # streams that the node's share of a batch overlaps
                begins = starts[own, None] + each[own, None] * np.arange(first_batch, end_batch)
                for places, change in ((begins + low[own, None], 1), (begins + high[own, None] - 1, -1)):
                    numbers = np.searchsorted(ends, places.ravel(), side="right") + (change < 0)
                    entered += change * np.bincount(numbers, minlength=len(entered))
            node_shards.append(np.sort(shards[np.cumsum(entered)[:-1] > 0]))
        return node_shards

    @cached_property
    def bytes_read(self) -> Counts | None:
        """Bytes of the shards that each node reads, [nodes], each shard counted once; None if the sizes are unknown."""
        sizes = self.sizes
        return None if sizes is None else np.array([sizes[shards].sum() for shards in self.shards_read])

    def format_lines(self) -> Iterator[str]:
        """Yield the plan as lines of text, each a name and a value."""
        request, samples, ranks = self.request, len(self.order), self.request.total_ranks
        ragged = samples % request.batch_size
        weighted = (self.order.taken != self.order.available).any()
        rank_shares = np.array([self.samples_of_rank(ranks - 1), self.samples_of_rank(0)])
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
            wanted = sufficient_cache_bytes(self.sizes, streams, parts, ranks=request.ranks, nodes=request.nodes)
            rows["bytes read"] = f"{format_range(self.bytes_read)} bytes a node"
            rows["cache wanted"] = f"{format_range(np.minimum(wanted, self.bytes_read))} bytes a node"
        if any(" to " in value for value in rows.values()):
            rows["a range"] = "from the rank or node with the least to the one with the most"
        return (f"{name:<18} {value}" for name, value in rows.items())
