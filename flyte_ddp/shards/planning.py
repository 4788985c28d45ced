"""The planner: compute from an index which shards ranks and nodes read, and how large caches should be.

In an epoch of training all ranks get the same number of batches, and each sample comes once (or as often as the weight
of its part says), so the plan tells about reading and caching. :mod:`flyte_ddp.shards.stream_plan` plans streams by
webdataset's rules, where ranks may get different numbers of batches.
"""

from collections.abc import Iterator

import numpy as np

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError
from flyte_ddp.order import sampling
from flyte_ddp.order.shard_order import ShardOrder, ShardSplits, count_rank_streams, slice_lengths
from flyte_ddp.shards.index import Shard, ShardIndex, read_index
from flyte_ddp.shards.inspection import refuse_unfit_samples
from flyte_ddp.shards.plan_request import PlanRequest
from flyte_ddp.shards.stream_plan import Counts, StreamPlan, format_range

HYPERPARAMETERS = ("batch_size", "shuffle_shards", "accumulation_steps", "validation_fraction", "seed")


def describe_plan(request: PlanRequest) -> Iterator[str]:
    """Yield the plan as texts of one or more lines, then a warning if training cannot read a first sample.

    Reads the index, with up to 3 retries, and the first sample of each part, without. Raises UserError if the options
    are incomplete or out of range, the index cannot be read, or, after all lines, DDP would hang on a stream.
    """
    if bool(request.index) == bool(request.shards):
        raise UserError(f"index={request.index!r}, shards={request.shards}: give an index, or --shards with --samples")
    if request.index:
        index = read_index(request.index)
    elif request.samples:
        index = ShardIndex("", [Shard("", request.samples, request.size or -1)] * request.shards)
    else:
        raise UserError("samples=0: give the number of samples of each shard")
    sizes = index.sizes if (index.sizes >= 0).all() else None
    stream = StreamPlan(request, index.counts, sizes) if request.stream else None
    if stream is None:
        hp = Hyperparameters(dataset="shards:planned", **{name: getattr(request, name) for name in HYPERPARAMETERS})
        splits = ShardSplits(index.counts, hp.validation_fraction, request.test_fraction, hp.seed)
        order = ShardOrder(splits, "training", index.weights, hp.shuffle_shards)
        yield "\n".join(describe_epoch(request, order, sizes))
    else:
        yield "\n".join(stream.format_lines())
        for rank, reader in np.ndindex(stream.samples.shape) if request.showsplits else ():
            own = range(rank + reader * request.total_ranks, len(index.shards), stream.samples.size)
            yield f"rank {rank} worker {reader}: {len(own)} shards: {', '.join(map(str, own))}"
    if request.index:
        try:
            refuse_unfit_samples(index, patient=False)
        except UserError as error:
            yield f"warning: {error.message}"
    if stream is not None:
        stream.refuse_hang()


def describe_epoch(request: PlanRequest, order: ShardOrder, sizes: Counts | None) -> Iterator[str]:
    """Return what ranks and nodes read in the first epoch of training, as lines of text: each a name and a value.

    Later epochs have the same length and read other shards. ``sizes`` has the bytes of each shard, [shards]; None if
    unknown. Raises UserError if there are no samples, or a batch has fewer samples than there are ranks.
    """
    batch_size, ranks, samples = request.batch_size, request.total_ranks, len(order)
    if not samples:
        raise UserError("the shards have no samples for training; lower validation_fraction, or take other shards")
    if batch_size < ranks:
        rule = f"must be at least the number of ranks, {ranks:,}, so that each has a sample"
        raise UserError(f"batch_size={batch_size}: {rule}; raise it or take fewer ranks")
    full, ragged = divmod(samples, batch_size)
    steps = f"{sampling.steps_per_epoch(samples, batch_size):,} on every rank"
    rank_samples = full * slice_lengths(batch_size, ranks) + slice_lengths(ragged, ranks)
    weighted = (order.taken != order.available).any()
    read = shards_of_nodes(order, batch_size, nodes=request.nodes, ranks=request.ranks)
    rows = {
        "ranks": f"{request.nodes:,} nodes x {request.ranks:,} = {ranks:,}",
        "steps an epoch": steps + (f", the last of {ragged:,} samples" if ragged else ""),
        "samples": f"{samples:,} an epoch; {format_range(rank_samples)} a rank",
        "dropped, repeated": "as the weights say" if weighted else "none, each sample comes once",
        "shards a node": f"{format_range(np.array([len(shards) for shards in read]))} of an epoch",
    }
    if sizes is not None:
        node_bytes = np.array([sizes[shards].sum() for shards in read])
        parts = min(request.accumulation_steps, batch_size)
        wanted = sufficient_cache_bytes(sizes, order.shuffle_streams, parts, ranks=request.ranks, nodes=request.nodes)
        rows["bytes read"] = f"{format_range(node_bytes)} bytes a node"
        rows["cache wanted"] = f"{format_range(np.minimum(wanted, node_bytes))} bytes a node"
    if any(" to " in value for value in rows.values()):
        rows["a range"] = "from the rank or node with the least to the one with the most"
    return (f"{name:<18} {value}" for name, value in rows.items())


def shards_of_nodes(order: ShardOrder, batch_size: int, *, nodes: int, ranks: int) -> list[Counts]:
    """Return for each node the sorted numbers of the shards that its ``ranks`` ranks read in the first epoch."""
    full, ragged = divmod(len(order), batch_size)
    starts, each = order.locate_streams(batch_size)
    shards, ends = order.sequence(0)
    # Full batches and the last, ragged one: samples from each stream, first batch, batch after the last.
    kinds = [(each, 0, full), (slice_lengths(ragged, len(each)), full, full + 1)]
    node_shards = []
    for node in range(nodes):
        # For each shard: stretches of the node's samples that begin in it, less those that end in the one before.
        # The cumulative sum is the number of stretches that touch a shard.
        entered = np.zeros(len(shards) + 1, dtype=np.int64)
        for lengths, first_batch, end_batch in kinds:
            total = int(lengths.sum())
            first, last = (sampling.slice_start(total, rank * ranks, nodes * ranks) for rank in (node, node + 1))
            before = np.cumsum(lengths) - lengths
            low, high = np.clip(first - before, 0, lengths), np.clip(last - before, 0, lengths)
            own = np.flatnonzero(high > low)  # streams that the node's share of a batch overlaps
            begins = starts[own, None] + each[own, None] * np.arange(first_batch, end_batch)
            for places, change in ((begins + low[own, None], 1), (begins + high[own, None] - 1, -1)):
                numbers = np.searchsorted(ends, places.ravel(), side="right") + (change < 0)
                entered += change * np.bincount(numbers, minlength=len(entered))
        node_shards.append(np.sort(shards[np.cumsum(entered)[:-1] > 0]))
    return node_shards


def sufficient_cache_bytes(sizes: Counts, shuffle_streams: int, parts: int, *, ranks: int, nodes: int = 1) -> int:
    """Return the bytes that are always enough for a node's cache, so that training fetches no shard twice in an epoch.

    It has room for the shards that each of the node's ``ranks`` reads from, and for as many that are being fetched. A
    batch is drawn from ``shuffle_streams`` shards, in ``parts`` micro-batches; ``sizes`` has the bytes of each shard.
    """
    return 2 * ranks * count_rank_streams(shuffle_streams, nodes * ranks, parts) * int(sizes.max())
