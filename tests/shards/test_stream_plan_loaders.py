"""The planner of shard streams against webdataset's own loaders, which really read shards and count their batches."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import webdataset as wds
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plans import PUBLISHED, SIMDIST

from flyte_ddp.errors import UserError
from flyte_ddp.shards.plan_request import PlanRequest
from flyte_ddp.shards.planning import StreamPlan

pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),  # webdataset leaves shards to be collected
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),  # it forks workers
    pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning"),  # of few cores
]

Batches = list[list[str]]  # keys of samples
Shards = Callable[[list[int]], list[str]]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    """Tiny shards, written when first asked for; no two places in a list share a file, nor samples a key."""
    folder = tmp_path_factory.mktemp("shards")

    def write(place: int, number: int) -> str:
        path = folder / f"{place:02d}-{number}.tar"
        if not path.exists():
            with wds.TarWriter(str(path)) as writer:
                for sample in range(number):
                    writer.write({"__key__": f"{place}-{sample}", "cls": "1"})
        return str(path)

    return lambda samples: [write(place, number) for place, number in enumerate(samples)]


def every(part: int, parts: int) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """simdist.py's way of splitting, ``urls[part::parts]``."""
    return lambda urls: itertools.islice(urls, part, None, parts)


def dataset(urls: list[str], rank: int, request: PlanRequest, by_worker: Callable[..., Any]) -> Any:
    """simdist.py's dataset, which gives keys in place of images."""
    by_node = every(rank, request.total_ranks)
    read = wds.WebDataset(urls, shardshuffle=False, nodesplitter=by_node, workersplitter=by_worker)
    made = read.shuffle(10).to_tuple("__key__").batched(request.batch_size, partial=request.partial)
    return made.repeat(request.dsrepeat) if request.dsrepeat > 1 else made


def load_in_processes(urls: list[str], rank: int, request: PlanRequest) -> Batches:
    """A rank's batches, from simdist.py's loader with its worker processes."""
    made = dataset(urls, rank, request, wds.split_by_worker)
    loader = wds.WebLoader(made, num_workers=request.workers, batch_size=None)
    if request.repeat > 1:
        loader = loader.repeat(nepochs=request.repeat)
    return [keys for [keys] in itertools.islice(loader, request.nbatches or None)]


def load_here(urls: list[str], rank: int, request: PlanRequest) -> Batches:
    """The same without processes: each worker's dataset is read here; their batches are dealt as the loader does."""
    readers = request.readers_per_rank
    streams = [dataset(urls, rank, request, every(reader, readers)) for reader in range(readers)]

    def one_pass() -> Iterator[list[str]]:
        turns = itertools.zip_longest(*([keys for (keys,) in stream] for stream in streams))
        yield from (batch for turn in turns for batch in turn if batch is not None)

    return list(itertools.islice(wds.DataPipeline(one_pass).repeat(request.repeat), request.nbatches or None))


def check_against(plan: StreamPlan, urls: list[str], load: Callable[[list[str], int, PlanRequest], Batches]) -> None:
    """Compare the plan with what ranks get: numbers of batches, and with whole passes the samples in them."""
    request = plan.request
    for rank in range(request.total_ranks):
        batches = load(urls, rank, request)
        assert plan.batches[rank] == len(batches)
        assert {len(batch) for batch in batches} <= {request.batch_size} or request.partial
        if request.partial and not request.nbatches:
            times = Counter(key for batch in batches for key in batch)
            assert set(times.values()) <= {request.repeat * request.dsrepeat}
            assert len(times) == plan.samples[rank].sum()


@pytest.mark.slow
@settings(max_examples=60, derandomize=True, deadline=None)
@given(data=st.data())
def test_the_plan_is_what_loaders_give(shards: Shards, data: st.DataObject) -> None:
    draw = data.draw
    request = PlanRequest(
        nodes=draw(st.integers(1, 2)),
        ranks=draw(st.integers(1, 2)),
        batch_size=draw(st.integers(1, 6)),
        workers=draw(st.integers(0, 3)),
        nbatches=draw(st.integers(0, 20)),
        partial=draw(st.booleans()),
        repeat=draw(st.integers(1, 3)),
        dsrepeat=draw(st.integers(1, 3)),
    )
    readers = request.total_ranks * request.readers_per_rank
    counts = draw(st.lists(st.integers(1, 7), min_size=readers, max_size=readers))
    counts += draw(st.lists(st.integers(0, 7), max_size=6))  # each reader has a sample, but there may be empty shards
    check_against(StreamPlan(request, np.array(counts)), shards(counts), load_here)


CUT_OFF = {"ranks": 2, "batch_size": 2, "workers": 2, "partial": True, "repeat": 3, "nbatches": 17}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "options"),
    [
        pytest.param(PUBLISHED, {}, id="published"),
        pytest.param(PUBLISHED, {"nbatches": 36, "dsrepeat": 2}, id="published fix"),
        pytest.param([5, 4, 7, 3, 9], {"ranks": 2, "batch_size": 2, "workers": 0, "repeat": 2}, id="no workers"),
        pytest.param([9, 8, 7, 6, 9, 3], CUT_OFF, id="cut off"),
    ],
)
def test_processes_give_what_is_planned(shards: Shards, counts: list[int], options: dict[str, Any]) -> None:
    """What the many cases above rest on: worker processes give just what is dealt here without them."""
    plan = StreamPlan(replace(SIMDIST, **options), np.array(counts))
    if counts is PUBLISHED:
        assert plan.batches.tolist() == ([36] * 3 if options else [36, 26, 26])
    check_against(plan, shards(counts), load_in_processes)


def test_a_worker_without_samples_is_an_error_as_it_is_in_webdataset(shards: Shards) -> None:
    for counts, ranks, said in (
        ([5], 1, "1 shards for ranks x workers = 1 x 2: .* at most 1 workers, or at least 2 shards"),
        ([5], 2, "1 shards for ranks x workers = 2 x 2: .* at most 1 ranks, or at least 4 shards"),
        ([5, 5, 5, 0], 2, "all shards of rank 1's worker 1 are empty: "),
    ):
        request = PlanRequest(ranks=ranks, batch_size=2, workers=2)
        with pytest.raises(UserError, match=said):
            StreamPlan(request, np.array(counts))
        with pytest.raises(ValueError, match="No samples found in dataset; perhaps you have fewer shards than workers"):
            load_here(shards(counts), ranks - 1, request)
