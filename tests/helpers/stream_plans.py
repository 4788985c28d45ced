"""Plans of shard streams, and runs that they are made for."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from flyte_ddp.shards.epoch_plan import Cluster
from flyte_ddp.shards.stream_plan import StreamOptions, StreamPlan, plan_streams

Run = tuple[list[int], Cluster, StreamOptions]  # with the samples of its shards

# The shards of simdist.py are no longer to be had, nor are their lengths written anywhere. With these it prints the
# counts it is known for, 36, 26 and 26, when run with its defaults.
PUBLISHED = [93, 95, 91, 94, 88, 92, 96, 94, 87, 90]
SIMDIST = StreamOptions(batch_size=10, workers=3)


def planned(samples: list[int], ranks: int, options: StreamOptions) -> StreamPlan:
    return plan_streams(np.array(samples, dtype=np.int64), None, Cluster(ranks_per_node=ranks), options)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Shards, ranks and a loader; each reader has a sample, but there may be empty shards."""
    cluster = Cluster(nodes=draw(st.integers(1, 2)), ranks_per_node=draw(st.integers(1, 2)))
    options = StreamOptions(
        batch_size=draw(st.integers(1, 6)),
        workers=draw(st.integers(0, 3)),
        nbatches=draw(st.none() | st.integers(1, 20)),
        partial=draw(st.booleans()),
        repeat=draw(st.integers(1, 3)),
        dsrepeat=draw(st.integers(1, 3)),
    )
    readers = cluster.ranks * max(options.workers, 1)
    first = draw(st.lists(st.integers(1, 7), min_size=readers, max_size=readers))
    return first + draw(st.lists(st.integers(0, 7), max_size=6)), cluster, options
