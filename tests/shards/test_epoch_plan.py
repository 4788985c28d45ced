"""The plan of an epoch against the epoch itself, gone through batch by batch."""

from __future__ import annotations

import json
import re
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
from flyte_ddp.order.shard_order import ShardOrder, ShardSplits, shard_orders
from flyte_ddp.shards.__main__ import shards as shards_command
from flyte_ddp.shards.epoch_plan import Cluster, plan_epoch
from flyte_ddp.shards.index import read_index
from flyte_ddp.shards.plan_request import PlanRequest
from flyte_ddp.shards.planning import planned


@given(
    counts=st.lists(st.integers(0, 20), min_size=1, max_size=15),
    nodes=st.integers(1, 4),
    ranks=st.integers(1, 3),
    batch_size=st.integers(1, 40),
    streams=st.integers(1, 9),
    seed=st.integers(0, 2),
    weight=st.sampled_from([1.0, 0.5, 3.0]),
)
def test_the_plan_is_what_happens(counts, nodes, ranks, batch_size, streams, seed, weight) -> None:
    counts = np.array(counts, dtype=np.int64)
    sizes = counts * 1000 + 7
    splits, weights = ShardSplits(counts, 0.1, 0.2, 0), np.resize([1.0, weight], len(counts))
    order = ShardOrder(splits, "training", weights, seed, streams)
    assume(len(order) and batch_size >= nodes * ranks)
    hp = Hyperparameters(batch_size=batch_size)
    plan = plan_epoch(order, sizes, Cluster(nodes=nodes, ranks_per_node=ranks), hp)
    shard_of = np.repeat(np.arange(len(counts)), counts)
    samples, read, steps = np.zeros(nodes * ranks, dtype=int), [set[int]() for _ in range(nodes)], 0
    for batch in order.batches(0, batch_size):
        steps += 1
        for rank in range(nodes * ranks):
            share = sampling.share(batch, rank, nodes * ranks)
            samples[rank] += len(share)
            read[rank // ranks] |= set(shard_of[share].tolist())
    assert plan.steps == steps
    assert [plan.share(rank) for rank in range(nodes * ranks)] == samples.tolist()
    assert plan.shards.tolist() == [len(shards) for shards in read]
    assert plan.bytes_read.tolist() == [sum(int(sizes[shard]) for shard in shards) for shards in read]
    assert plan.weighted == bool((order.taken != order.available).any())


@pytest.mark.parametrize(("test_dataset", "test_fraction"), [("", 0.1), ("shards:elsewhere", 0.0)])
def test_the_command_plans_what_training_does(tmp_path: Path, test_dataset: str, test_fraction: float) -> None:
    """With parts of other weights, and with a test set or a tenth held out; against the order that training makes."""
    for name in ("one", "two"):
        shards = [{"url": f"/{name}/{number}.tar", "nsamples": 100, "filesize": 10} for number in range(10)]
        (tmp_path / f"{name}.json").write_text(json.dumps({"wids_version": 1, "name": name, "shardlist": shards}))
    parts = [{"source_url": f"{tmp_path}/one.json", "weight": 3}, {"source_url": f"{tmp_path}/two.json", "weight": 0.5}]
    (tmp_path / "both.json").write_text(json.dumps({"wids_version": 1, "datasets": parts}))
    hp = Hyperparameters(dataset=f"shards:{tmp_path}/both.json", test_dataset=test_dataset, batch_size=100)
    index = read_index(str(tmp_path / "both.json"))
    order = shard_orders(index.counts, index.weights, hp, test_fraction)["training"]
    command = ["plan", str(tmp_path / "both.json"), "--batch-size", "100", "--test-fraction", str(test_fraction)]
    said = CliRunner().invoke(shards_command, command)
    assert said.exit_code == 0
    assert f"{len(order):,} an epoch; {len(order):,} a rank" in said.output
    assert f"{len(list(order.batches(0, 100)))} on every rank" in said.output
    assert "as the weights say" in said.output


def test_a_hundred_thousand_shards_and_ten_thousand_ranks() -> None:
    request = PlanRequest(
        shards=100_000, samples=1000, size=10**8, nodes=1250, ranks=8, batch_size=20_000, shuffle_shards=1250
    )
    (text,) = planned(request)
    assert "1,250 nodes x 8 = 10,000" in text
    assert "4,050 on every rank" in text  # 0.9 x 90,000,000 / 20,000
    assert "; 8,100 a rank" in text


def test_ranges_are_explained() -> None:
    explained = "from the rank or node with the least to the one with the most"
    even = PlanRequest(shards=40, samples=100, size=10, nodes=2, ranks=1, batch_size=64, validation_fraction=0.0)
    (text,) = planned(replace(even, test_fraction=0.0, samples=64))
    assert " to " not in text
    (text,) = planned(replace(even, nodes=4, ranks=2, test_fraction=0.1, samples=99))
    assert re.search(r"\d to \d+ a rank", text)
    assert explained in text
    streams = PlanRequest(shards=5, samples=90, size=10, nodes=2, ranks=1, batch_size=10, stream=True, nbatches=12)
    (text,) = planned(streams)
    assert "bytes of a node's shards: 20 to 30" in text


def test_the_streams_of_the_same_numbers_are_refused_where_ddp_would_hang() -> None:
    request = PlanRequest(shards=10, samples=90, ranks=3, batch_size=10, stream=True, workers=3, showsplits=True)
    lines: list[str] = []
    with pytest.raises(UserError, match="DDP hangs unless all get the same number"):
        lines.extend(planned(request))
    assert "rank 0 worker 0: 2 shards: 0, 9" in lines  # the plan comes before the refusal


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (PlanRequest(), "give an index, or --shards"),
        (PlanRequest(shards=0, samples=3), "must be at least 1"),
        (PlanRequest(shards=3), "must be at least 1"),
        (PlanRequest(shards=3, samples=10, size=-1), "size=-1: must be at least 1 byte"),
        (PlanRequest(shards=3, samples=10, ranks=200), "batch_size=128: must be at least the number of ranks, 200"),
        (PlanRequest(shards=3, samples=10, nodes=0), "nodes"),
        (PlanRequest(shards=3, samples=10, shuffle_shards=0), "shuffle_shards=0: must be at least 1"),
        (PlanRequest(shards=3, samples=10, accumulation_steps=0), "accumulation_steps=0: must be at least 1"),
        (PlanRequest(shards=3, samples=10, seed=-1), "seed=-1: must be at least 0"),
        (PlanRequest(shards=3, samples=10, validation_fraction=-1.0), r"validation_fraction=-1\.0: must be at least 0"),
        (PlanRequest(shards=3, samples=10, test_fraction=2.0), r"test_fraction=2\.0: must be at least 0 and below 1"),
    ],
)
def test_words(request_: PlanRequest, word: str) -> None:
    with pytest.raises(UserError, match=word):
        list(planned(request_))
