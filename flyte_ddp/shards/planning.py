"""The planner: computes which part of a data set of shards each rank and node reads, without reading the shards."""

from collections.abc import Iterator

import numpy as np

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError
from flyte_ddp.order.shard_order import shard_orders
from flyte_ddp.shards.epoch_plan import EpochPlan
from flyte_ddp.shards.first_sample import refuse_unfit_samples
from flyte_ddp.shards.index import Shard, ShardIndex, read_index
from flyte_ddp.shards.plan_request import PlanRequest
from flyte_ddp.shards.stream_plan import StreamPlan

HYPERPARAMETERS = ("batch_size", "shuffle_shards", "accumulation_steps", "validation_fraction", "seed")


def describe_plan(request: PlanRequest) -> Iterator[str]:
    """Yield the plan as lines of text, then a warning if training cannot read a first sample of the index.

    Reads the index, and the first sample of each of its parts, without retries.

    Raises:
        UserError: the options are incomplete or out of range; the index cannot be read; or, after all lines, a plan of
            a stream in which DDP would hang.
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
        order = shard_orders(index.counts, index.weights, hp, request.test_fraction)["training"]
        yield "\n".join(EpochPlan(request, order, sizes).format_lines())
    else:
        yield "\n".join(stream.format_lines())
        for rank, reader in np.ndindex(stream.samples.shape) if request.showsplits else ():
            own = range(rank + reader * request.total_ranks, request.shards or len(index.shards), stream.samples.size)
            yield f"rank {rank} worker {reader}: {len(own)} shards: {', '.join(map(str, own))}"
    if request.index:
        try:
            refuse_unfit_samples(index, patient=False)
        except UserError as error:
            yield f"warning: {error.message}"
    if stream is not None:
        stream.refuse_hang()
