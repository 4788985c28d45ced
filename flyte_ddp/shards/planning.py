"""The planner: from an index, or numbers of shards, to the plan's lines."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError
from flyte_ddp.order.shard_order import shard_orders
from flyte_ddp.shards.epoch_plan import Cluster, plan_epoch
from flyte_ddp.shards.first_sample import refuse_unfit
from flyte_ddp.shards.index import ShardIndex, read_index
from flyte_ddp.shards.plan_request import PlanRequest
from flyte_ddp.shards.stream_plan import StreamOptions, plan_streams

OF_EPOCHS = ("batch_size", "shuffle_shards", "accumulation_steps", "validation_fraction", "seed")
OF_STREAMS = ("batch_size", "workers", "nbatches", "partial", "repeat", "dsrepeat")


def planned(request: PlanRequest) -> Iterator[str]:
    """Yield the plan line by line, and last a warning if training cannot read the index's first sample.

    Raises:
        UserError: DDP would hang (after the plan itself), or numbers that cannot be planned with.
    """
    index, counts, sizes, weights = described(request)
    cluster = Cluster(nodes=request.nodes, ranks_per_node=request.ranks)
    if not request.stream:
        if not 0 <= request.test_fraction < 1:
            raise UserError(f"test_fraction={request.test_fraction}: must be at least 0 and below 1")
        hp = Hyperparameters(dataset="shards:planned", **{name: getattr(request, name) for name in OF_EPOCHS})
        order = shard_orders(counts, weights, hp, request.test_fraction)["training"]
        yield plan_epoch(order, sizes, cluster, hp).describe()
        yield from warnings(index)
        return
    options = StreamOptions(**{name: getattr(request, name) for name in OF_STREAMS})
    stream = plan_streams(counts, sizes, cluster, options)
    yield "\n".join(stream.describe())
    for rank, reader, shards in stream.splits() if request.showsplits else ():
        yield f"rank {rank} worker {reader}: {len(shards)} shards: {', '.join(map(str, shards))}"
    yield from warnings(index)
    stream.refuse()


def warnings(index: ShardIndex | None) -> Iterator[str]:
    """Yield why training would refuse an index, or that this is not known as a shard cannot be read."""
    try:
        if index is not None:
            refuse_unfit(index, patient=False)
    except UserError as error:
        yield f"warning: {error.message}"


def described(
    request: PlanRequest,
) -> tuple[ShardIndex | None, NDArray[np.int64], NDArray[np.int64] | None, NDArray[np.float64]]:
    """Return the index, if there is one, and [shards] samples, bytes and weights, from it or from numbers."""
    if (request.index is None) == (request.shards is None):
        raise UserError(f"index={request.index}, shards={request.shards}: give an index, or --shards with --samples")
    if request.index is not None:
        index = read_index(request.index)
        return index, index.counts, index.sizes if (index.sizes >= 0).all() else None, index.weights
    if request.shards is None or request.shards < 1 or request.samples is None or request.samples < 1:
        raise UserError(f"shards={request.shards}, samples={request.samples}: both must be at least 1")
    if request.size is not None and request.size < 1:
        raise UserError(f"size={request.size}: must be at least 1 byte")
    sizes = None if request.size is None else np.full(request.shards, request.size, dtype=np.int64)
    return None, np.full(request.shards, request.samples, dtype=np.int64), sizes, np.ones(request.shards)
