"""The planner's words."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError
from flyte_ddp.shards.epoch_plan import plan_training
from flyte_ddp.shards.index import read_index
from flyte_ddp.shards.plan_request import PlanRequest
from flyte_ddp.shards.stream_plan import plan_streams
from flyte_ddp.shards.stream_readers import Gang, StreamOptions


def planned(request: PlanRequest) -> Iterator[str]:
    """The plan, line by line.

    Raises:
        UserError: DDP would hang (after the plan itself), or numbers that cannot be planned with.
    """
    counts, sizes, weights = described(request)
    gang = Gang(nodes=request.nodes, ranks_per_node=request.ranks)
    if not request.stream:
        hp = Hyperparameters(
            dataset=f"shards:{request.index or 'planned'}",
            batch_size=request.batch_size,
            shuffle_shards=request.shuffle_shards,
            accumulation_steps=request.accumulation_steps,
            validation_fraction=request.validation_fraction,
            seed=request.seed,
        )
        plan = plan_training(counts, sizes, weights, gang, hp, test_fraction=request.test_fraction)
        yield plan.describe()
        return
    options = StreamOptions(
        batch_size=request.batch_size,
        workers=request.workers,
        nbatches=request.nbatches,
        partial=request.partial,
        repeat=request.repeat,
        dsrepeat=request.dsrepeat,
    )
    stream = plan_streams(counts, sizes, gang, options)
    yield stream.describe()
    for rank, reader, shards in stream.splits() if request.showsplits or request.showopen else ():
        if request.showsplits:
            yield f"rank {rank} worker {reader}: {len(shards)} shards: {', '.join(map(str, shards))}"
        if request.showopen:
            for number, shard in stream.openings(rank, reader):
                yield f"rank {rank} worker {reader} pass {number} opens shard {shard}"
    stream.refuse()


def described(request: PlanRequest) -> tuple[NDArray[np.int64], NDArray[np.int64] | None, NDArray[np.float64]]:
    """[shards] samples, bytes and weights, from an index or from numbers."""
    if (request.index is None) == (request.shards is None):
        raise UserError(f"index={request.index}, shards={request.shards}: give an index, or --shards with --samples")
    if request.index is not None:
        index = read_index(request.index)
        return index.counts, index.sizes if (index.sizes >= 0).all() else None, index.weights
    if request.shards is None or request.shards < 1 or request.samples is None or request.samples < 1:
        raise UserError(f"shards={request.shards}, samples={request.samples}: both must be at least 1")
    if request.size is not None and request.size < 1:
        raise UserError(f"size={request.size}: must be at least 1 byte")
    sizes = None if request.size is None else np.full(request.shards, request.size, dtype=np.int64)
    return np.full(request.shards, request.samples, dtype=np.int64), sizes, np.ones(request.shards)
