"""The planner: epochs against the order gone through batch by batch, and what the plan of a stream says and refuses."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import assume, given
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


def test_bytes_of_nodes() -> None:
    sizes = np.array([1, 10, 100, 1000, 10_000, 100_000, 1_000_000, 10_000_000])
    plan = StreamPlan(PlanRequest(nodes=2, ranks=2, workers=2), np.full(8, 2), sizes)
    assert "bytes of a node's shards: 110,011 to 11,001,100" in plan.format_lines()


def test_the_plan_of_a_stream_comes_before_its_refusal() -> None:
    lines: list[str] = []
    with pytest.raises(UserError, match="DDP hangs unless all get the same number"):
        lines.extend(describe_plan(replace(SIMDIST, shards=10, samples=90, showsplits=True)))
    assert "rank 0 worker 0: 2 shards: 0, 9" in lines


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
