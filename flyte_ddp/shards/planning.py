"""The planner: compute from an index which shards ranks and nodes read, and how large caches should be.

A :class:`StreamPlan` is by webdataset's rules, where ranks may get different numbers of batches.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError
from flyte_ddp.order import sampling
from flyte_ddp.order.shard_order import ShardOrder, ShardSplits, count_rank_streams, slice_lengths
from flyte_ddp.shards.cache import SPARE
from flyte_ddp.shards.index import Shard, ShardIndex, read_index
from flyte_ddp.shards.inspection import refuse_unfit_samples
from flyte_ddp.shards.plan_request import PlanRequest

Counts = NDArray[np.int64]
NO_SAMPLES = "webdataset ends with an error in a worker without samples"
HYPERPARAMETERS = ("batch_size", "shuffle_shards", "accumulation_steps", "validation_fraction", "seed")


def describe_plan(request: PlanRequest) -> Iterator[str]:
    """Yield the plan as texts of one or more lines, then a warning if training cannot read a first sample.

    Reads the index and the first sample of each part. Raises UserError for bad options, an unreadable index, or (after
    all lines) a stream on which DDP would hang.
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
    """Yield lines about the first epoch of training; later ones are as long. ``sizes`` has each shard's bytes."""
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
    """Return the size of a node's cache, in bytes, with which training fetches no shard twice in an epoch."""
    # Room for the shards that each of the node's ranks reads from, for as many that are being fetched, and for those
    # that are evicted beyond what is necessary.
    shards = 2 * ranks * count_rank_streams(shuffle_streams, nodes * ranks, parts)
    return (shards + shards // (SPARE - 1)) * int(sizes.max())


def format_range(numbers: Counts) -> str:
    least, most = int(numbers.min()), int(numbers.max())
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def sum_by_reader(values: Counts, ranks: int, readers: int) -> Counts:
    """Add up one value of each shard, [shards], over the shards of each reader; return the sums, [ranks, readers]."""
    padded = np.pad(values, (0, -len(values) % (ranks * readers)))
    return np.asarray(padded.reshape(-1, readers, ranks).sum(axis=0).T)


@dataclass(frozen=True, eq=False)
class StreamPlan:
    """The batches that the loaders of all ranks give when webdataset reads shards as a stream.

    Computes what ``simdist.py`` (tmbdev-archive/wds-distributed) counts by running all loaders, by the rules of
    webdataset 1.0.2 and torch. Shard ``i`` goes to rank ``i % ranks``, there to reader ``i // ranks % readers``. Each
    reader cuts its samples into batches, ``dsrepeat`` times. The loader takes the batches of all readers, ``repeat``
    times, and stops after ``nbatches``. Raises UserError if a reader would have no samples, as webdataset does.
    """

    request: PlanRequest  # numbers of nodes, ranks and workers, and the loaders' options
    counts: Counts  # [shards] samples of each shard, in the order of the list of shards
    sizes: Counts | None = None  # [shards] bytes of each shard; None if unknown

    def __post_init__(self) -> None:
        shards, ranks, readers = len(self.counts), self.request.total_ranks, self.request.readers_per_rank
        if shards < ranks * readers:
            fix = f"at most {shards // ranks} workers" if shards >= ranks else f"at most {shards:,} ranks"
            where = f"{shards:,} shards for ranks x workers = {ranks:,} x {readers}"
            raise UserError(f"{where}: {NO_SAMPLES}; take {fix}, or at least {ranks * readers:,} shards")
        for rank, reader in np.argwhere(self.samples == 0):
            where = f"all shards of rank {rank}'s worker {reader} are empty"
            raise UserError(f"{where}: {NO_SAMPLES}; leave out empty shards, or take fewer workers")

    @cached_property
    def samples(self) -> Counts:
        """Samples in the shards of each reader, [ranks, readers]."""
        return sum_by_reader(self.counts, self.request.total_ranks, self.request.readers_per_rank)

    @cached_property
    def batches_per_pass(self) -> Counts:
        """Batches of each rank when every reader reads its shards once, [ranks]."""
        batch_size = self.request.batch_size
        reader_batches = -(-self.samples // batch_size) if self.request.partial else self.samples // batch_size
        return np.asarray(reader_batches.sum(axis=1))

    @cached_property
    def batches(self) -> Counts:
        """Batches of each rank in an epoch, [ranks]."""
        batches = self.request.repeat * self.request.dsrepeat * self.batches_per_pass
        return np.minimum(batches, self.request.nbatches) if self.request.nbatches else batches

    @property
    def hangs(self) -> bool:
        """Whether ranks get different numbers of batches, so that DDP would wait forever."""
        return bool(self.batches.min() != self.batches.max())

    def replace_options(self, **options: Any) -> Self:
        return type(self)(replace(self.request, **options), self.counts)

    def suggest_options(self) -> list[dict[str, int]]:
        """Return changes of options, such as {"workers": 3}; each gives all ranks the same number of batches."""
        least, most = int(self.batches.min()), int(self.batches.max())
        changes = [{"nbatches": least}] if least else []
        if shortest := self.request.repeat * int(self.batches_per_pass.min()):
            changes.append({"nbatches": most, "dsrepeat": -(-most // shortest)})
        readers, shards, divisor = self.request.readers_per_rank, len(self.counts), self.samples.size
        # The nearest numbers of workers below and above, up to twice as many.
        for nearby in (range(readers - 1, 0, -1), range(readers + 1, 2 * readers + 1)):
            changes += [{"workers": workers} for workers in nearby if self.avoids_hang(workers)][:1]
        # The nearest numbers of shards that readers share evenly, if shards are equal.
        even_numbers = {shards // divisor * divisor, -(-shards // divisor) * divisor} - {0}
        return changes + [{"shards": number} for number in sorted(even_numbers)]

    def avoids_hang(self, workers: int) -> bool:
        with suppress(UserError):
            plan = self.replace_options(workers=workers)
            return not plan.hangs and bool(plan.batches.any())
        return False

    @property
    def advice(self) -> str:
        ways = [" with ".join(f"{name}={number}" for name, number in way.items()) for way in self.suggest_options()]
        return f"take {', or '.join(ways)} (of shards with equal numbers of samples)"

    def refuse_hang(self) -> None:
        """Raise UserError, with suggested options, if ranks get different numbers of batches or no rank gets one."""
        if not self.batches.any():
            problem = f"no worker has more than {self.samples.max():,} samples, and smaller batches are dropped"
            fix = "lower batch_size or workers, or keep partial batches"
            raise UserError(f"batch_size={self.request.batch_size}: {problem}; {fix}")
        if self.hangs:
            batches = format_range(self.batches)
            raise UserError(f"the ranks get {batches} batches: DDP hangs unless all get the same number; {self.advice}")

    def format_lines(self, limit: int = 8) -> Iterator[str]:
        """Yield the plan as lines of text, with one line for each of the first ``limit`` ranks."""
        request, samples = self.request, self.samples.sum(axis=1)
        workers = f"nodes x ranks x workers = {request.nodes:,} x {request.ranks:,} x {request.workers:,}"
        shards = f"{len(self.counts):,} shards with {samples.sum():,} samples"
        yield f"{shards}; {workers}; batches of {request.batch_size:,}"
        row = "{:>6}{:>10}{:>14}{:>11}".format
        yield row("rank", "shards", "samples", "batches")
        for rank in range(min(limit, request.total_ranks)):
            own = len(range(rank, len(self.counts), request.total_ranks))
            yield row(rank, f"{own:,}", f"{samples[rank]:,}", f"{self.batches[rank]:,}")
        if (others := self.batches[limit:]).size:
            yield f"and {others.size:,} more with {format_range(others)} batches each"
        if self.sizes is not None:
            node_bytes = sum_by_reader(self.sizes, request.total_ranks, 1).reshape(request.nodes, -1).sum(axis=1)
            yield f"bytes of a node's shards: {format_range(node_bytes)}"
        if self.hangs:
            yield f"DDP would hang, as ranks get different numbers of batches; {self.advice}"
        elif self.batches.any():
            yield f"every rank gets {self.batches[0]:,} batches"
        else:
            yield "no rank gets a batch: every worker has fewer samples than one takes"
        if request.partial and (self.samples % request.batch_size).any():
            yield "some batches are partial: where ranks' batches differ in size, DDP weighs samples unequally"
