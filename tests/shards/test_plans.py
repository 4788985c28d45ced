"""The planner: epochs against the order gone through batch by batch, and streams against webdataset's own loaders."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset as wds
from click.testing import CliRunner
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError
from flyte_ddp.order import sampling
from flyte_ddp.order.shard_order import ShardOrder, ShardSplits
from flyte_ddp.shards.__main__ import shards as shards_command
from flyte_ddp.shards.index import read_index
from flyte_ddp.shards.plan_request import PlanRequest
from flyte_ddp.shards.planning import StreamPlan, describe_epoch, describe_plan, format_range, shards_of_nodes

# The shards of simdist.py are no longer to be had, nor are their lengths written anywhere. With these it prints the
# counts it is known for, 36, 26 and 26, when run with its defaults.
PUBLISHED = [93, 95, 91, 94, 88, 92, 96, 94, 87, 90]
SIMDIST = PlanRequest(stream=True, ranks=3, batch_size=10, workers=3)


@given(
    counts=st.lists(st.integers(0, 20), min_size=1, max_size=15),
    nodes=st.integers(1, 4),
    ranks=st.integers(1, 3),
    batch_size=st.integers(1, 40),
    streams=st.integers(1, 9),
    seed=st.integers(0, 2),
    weight=st.sampled_from([1.0, 0.5, 3.0]),
)
def test_the_plan_of_an_epoch_is_what_happens(counts, nodes, ranks, batch_size, streams, seed, weight) -> None:
    counts = np.array(counts, dtype=np.int64)
    sizes = counts * 1000 + 7
    splits, weights = ShardSplits(counts, 0.1, 0.2, seed), np.resize([1.0, weight], len(counts))
    order = ShardOrder(splits, "training", weights, streams)
    assume(len(order) and batch_size >= nodes * ranks)
    shard_of = np.repeat(np.arange(len(counts)), counts)
    samples, read, steps = np.zeros(nodes * ranks, dtype=int), [set[int]() for _ in range(nodes)], 0
    for batch in order.batches(0, batch_size):
        steps += 1
        for rank in range(nodes * ranks):
            share = sampling.take_slice(batch, rank, nodes * ranks)
            samples[rank] += len(share)
            read[rank // ranks] |= set(shard_of[share].tolist())
    planned = shards_of_nodes(order, batch_size, nodes=nodes, ranks=ranks)
    assert [shards.tolist() for shards in planned] == [sorted(shards) for shards in read]
    lines = "\n".join(describe_epoch(PlanRequest(nodes=nodes, ranks=ranks, batch_size=batch_size), order, sizes))
    assert f"{steps:,} on every rank" in lines
    assert f"{samples.sum():,} an epoch; {format_range(samples)} a rank" in lines
    assert f" {format_range(np.array([len(shards) for shards in read]))} of an epoch" in lines
    assert f" {format_range(np.array([sizes[list(shards)].sum() for shards in read]))} bytes a node" in lines


def test_the_command_plans_what_training_does(tmp_path: Path) -> None:
    """With parts of other weights, and with a test set or a tenth held out; against the order that training makes."""
    for name in ("one", "two"):
        shards = [{"url": f"/{name}/{number}.tar", "nsamples": 100, "filesize": 10} for number in range(10)]
        (tmp_path / f"{name}.json").write_text(json.dumps({"wids_version": 1, "name": name, "shardlist": shards}))
    parts = [{"source_url": f"{tmp_path}/one.json", "weight": 3}, {"source_url": f"{tmp_path}/two.json", "weight": 0.5}]
    (tmp_path / "both.json").write_text(json.dumps({"wids_version": 1, "datasets": parts}))
    hp = Hyperparameters(dataset=f"shards:{tmp_path}/both.json", batch_size=100)
    index = read_index(str(tmp_path / "both.json"))
    for held_out in (0.1, 0.0):
        splits = ShardSplits(index.counts, hp.validation_fraction, held_out, hp.seed)
        order = ShardOrder(splits, "training", index.weights, hp.shuffle_shards)
        command = ["plan", str(tmp_path / "both.json"), "--batch-size", "100", "--test-fraction", str(held_out)]
        said = CliRunner().invoke(shards_command, command)
        assert said.exit_code == 0
        assert f"{len(order):,} an epoch; {len(order):,} a rank" in said.output
        assert f"{len(list(order.batches(0, 100)))} on every rank" in said.output
        assert "as the weights say" in said.output


def test_a_hundred_thousand_shards_and_ten_thousand_ranks() -> None:
    request = PlanRequest(
        shards=100_000, samples=1000, size=10**8, nodes=250, ranks=40, batch_size=20_000, shuffle_shards=1250
    )
    (text,) = describe_plan(request)
    assert "250 nodes x 40 = 10,000" in text
    assert "4,050 on every rank" in text  # 0.9 x 90,000,000 / 20,000
    assert "; 8,100 a rank" in text
    assert "from the rank or node with the least" not in text
    (uneven,) = describe_plan(replace(request, shards=40, samples=99, nodes=4, ranks=2, batch_size=64))
    assert "from the rank or node with the least to the one with the most" in uneven


def test_the_published_mistake_is_refused_with_the_published_fixes() -> None:
    plan = StreamPlan(SIMDIST, np.array(PUBLISHED), np.array([10] * 10))
    assert list(plan.format_lines(limit=2)) == [
        "10 shards with 920 samples; nodes x ranks x workers = 1 x 3 x 3; batches of 10",
        "  rank    shards       samples    batches",
        "     0         4           373         36",
        "     1         3           277         26",
        "and 1 more with 26 batches each",
        "bytes of a node's shards: 100",
        f"DDP would hang, as ranks get different numbers of batches; {plan.advice}",
    ]
    assert plan.suggest_options()[:2] == [{"nbatches": 26}, {"nbatches": 36, "dsrepeat": 2}]
    assert plan.suggest_options()[-2:] == [{"shards": 9}, {"shards": 18}]
    assert "take nbatches=26, or nbatches=36 with dsrepeat=2, or " in plan.advice
    with pytest.raises(UserError, match="the ranks get 26 to 36 batches: DDP hangs unless all get the same number"):
        plan.refuse_hang()
    assert {"nbatches": 32, "dsrepeat": 2} in plan.replace_options(nbatches=32).suggest_options()
    for way in ({"nbatches": 26}, {"nbatches": 36, "dsrepeat": 2}):
        plan.replace_options(**way).refuse_hang()
        assert f"every rank gets {way['nbatches']} batches" in plan.replace_options(**way).format_lines()


@given(
    counts=st.lists(st.integers(1, 9), min_size=6, max_size=14),
    ranks=st.integers(1, 2),
    batch_size=st.integers(1, 6),
    workers=st.integers(0, 3),
    nbatches=st.integers(0, 20),
    partial=st.booleans(),
    repeat=st.integers(1, 3),
)
def test_suggestions_make_it_exact(counts, ranks, batch_size, workers, nbatches, partial, repeat) -> None:
    request = PlanRequest(
        ranks=ranks, batch_size=batch_size, workers=workers, nbatches=nbatches, partial=partial, repeat=repeat
    )
    present = StreamPlan(request, np.array(counts))
    for way in present.suggest_options():
        if "shards" in way:
            changed = StreamPlan(request, np.full(way["shards"], batch_size))
        else:
            changed = present.replace_options(**way)
        assert not changed.hangs
        assert changed.batches.all()
        if way.keys() == {"nbatches"} and present.hangs:
            assert present.replace_options(nbatches=way["nbatches"] + 1).hangs
        if way.get("dsrepeat", 1) > 1:
            assert way["nbatches"] == present.batches.max()
            assert present.replace_options(**way | {"dsrepeat": way["dsrepeat"] - 1}).batches.min() < way["nbatches"]


def test_the_plan_of_a_stream_comes_before_its_refusal() -> None:
    sizes = 10 ** np.arange(8)
    plan = StreamPlan(PlanRequest(nodes=2, ranks=2, workers=2), np.full(8, 2), sizes)
    assert "bytes of a node's shards: 110,011 to 11,001,100" in plan.format_lines()
    lines: list[str] = []
    with pytest.raises(UserError, match="DDP hangs unless all get the same number"):
        lines.extend(describe_plan(replace(SIMDIST, shards=10, samples=90, showsplits=True)))
    assert "rank 0 worker 0: 2 shards: 0, 9" in lines


def test_the_nearest_workers_are_suggested() -> None:
    plan = StreamPlan(replace(SIMDIST, ranks=2, workers=4), np.array([10, 5] * 3 + [10, 15] * 3))
    assert plan.batches.tolist() == [6, 5]
    assert [way["workers"] for way in plan.suggest_options() if "workers" in way] == [3]
    assert plan.replace_options(workers=3).batches.tolist() == [6, 6]


def test_batches_that_no_worker_can_fill_and_partial_ones() -> None:
    plan = StreamPlan(replace(SIMDIST, ranks=2, batch_size=4, workers=2, dsrepeat=5), np.array([3, 3, 2, 3]))
    assert "no rank gets a batch: every worker has fewer samples than one takes" in plan.format_lines()
    assert not any("nbatches" in way for way in plan.suggest_options())
    with pytest.raises(UserError, match="batch_size=4: no worker has more than 3 samples"):
        plan.refuse_hang()
    kept = plan.replace_options(partial=True)
    assert kept.batches.tolist() == [10, 10]
    kept.refuse_hang()
    assert list(kept.format_lines())[-1].startswith("some batches are partial: where ranks' batches differ in size")


def test_numbers_that_cannot_be_planned_with() -> None:
    for options, said in (
        ({}, "give an index, or --shards"),
        ({"shards": 3}, "samples=0: give the number"),
        ({"shards": 3, "samples": 10, "size": -1}, "size=-1: must be at least 0"),
        ({"shards": 3, "samples": 10, "ranks": 200}, "batch_size=128: must be at least the number of ranks, 200"),
        ({"shards": 3, "samples": 10, "shuffle_shards": 0}, "shuffle_shards=0: must be at least 1"),
        ({"shards": 3, "samples": 10, "test_fraction": 2.0}, r"test_fraction=2\.0: must be below 1"),
        ({"shards": 1, "samples": 2, "test_fraction": 0.9}, "no samples for training"),
    ):
        with pytest.raises(UserError, match=said):
            list(describe_plan(PlanRequest(**options)))


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
@settings(max_examples=40, derandomize=True, deadline=None)
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
        pytest.param(PUBLISHED, {"nbatches": 36, "dsrepeat": 2}, id="published fix", marks=pytest.mark.exhaustive),
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
