"""The planner of shard streams by itself: what it counts, suggests, prints and refuses."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from stream_plans import PUBLISHED, SIMDIST, Run, planned, runs

from flyte_ddp.errors import UserError
from flyte_ddp.shards.epoch_plan import Cluster
from flyte_ddp.shards.stream_plan import StreamOptions, StreamPlan, plan_streams


def test_the_published_mistake_is_refused_with_the_published_fixes() -> None:
    plan = planned(PUBLISHED, 3, SIMDIST)
    assert plan.suggestions()[:2] == [{"nbatches": 26}, {"nbatches": 36, "dsrepeat": 2}]
    assert plan.suggestions()[-2:] == [{"shards": 9}, {"shards": 18}]
    with pytest.raises(UserError) as refused:
        plan.refuse()
    assert refused.value.message.startswith("the ranks get 26 to 36 batches: DDP hangs unless all get the same number")
    assert "take nbatches=26, or nbatches=36 with dsrepeat=2, or " in refused.value.message
    assert "shards=9, or shards=18 (of shards with equal numbers of samples)" in refused.value.message
    assert {"nbatches": 32, "dsrepeat": 2} in planned(PUBLISHED, 3, replace(SIMDIST, nbatches=32)).suggestions()
    planned(PUBLISHED, 3, replace(SIMDIST, nbatches=26)).refuse()


@settings(max_examples=100, derandomize=True, deadline=None)
@given(run=runs())
def test_suggestions_make_it_exact(run: Run) -> None:
    samples, cluster, options = run
    suggestions = plan_streams(np.array(samples), None, cluster, options).suggestions()

    def changed(samples: list[int] = samples, **changes: int) -> StreamPlan:
        return plan_streams(np.array(samples), None, cluster, replace(options, **changes))

    def works(plan: StreamPlan) -> bool:
        return not plan.hangs and plan.batches.all()

    present = changed()
    for way in suggestions:
        assert works(changed([options.batch_size] * way["shards"]) if "shards" in way else changed(**way))
        if way.keys() == {"nbatches"}:
            assert not present.hangs or not works(changed(nbatches=way["nbatches"] + 1))
        if "dsrepeat" in way:
            assert way["nbatches"] == present.batches.max()
            fewer = way | {"dsrepeat": way["dsrepeat"] - 1}
            assert not fewer["dsrepeat"] or changed(**fewer).batches.min() < way["nbatches"]
    if not present.batches.all():
        assert all(way.keys() != {"nbatches"} for way in suggestions)
        with pytest.raises(UserError):
            present.refuse()


def near(plan: StreamPlan, name: str) -> list[int]:
    return [way[name] for way in plan.suggestions() if way.keys() == {name}]


def test_suggestions_are_the_nearest() -> None:
    assert near(planned([10] * 12, 2, StreamOptions(batch_size=10, workers=3)), "shards") == [12]
    # 12 shards of one batch each make six for a rank, however they are dealt.
    assert near(planned([10] * 12, 2, StreamOptions(batch_size=10, workers=4)), "workers") == [3, 5]
    uneven = [10, 5] * 3 + [10, 15] * 3
    plan = planned(uneven, 2, StreamOptions(batch_size=10, workers=4))
    assert plan.batches.tolist() == [6, 5]
    assert near(plan, "workers") == [3]
    assert planned(uneven, 2, StreamOptions(batch_size=10, workers=3)).batches.tolist() == [6, 6]


def counted(samples: list[int], rank: int, ranks: int, options: StreamOptions) -> tuple[Counter[int], int]:
    """A rank's batches by size, and the samples in them, counted one by one in plain Python."""
    mine = [samples[rank::ranks][reader :: options.workers] for reader in range(options.workers)]

    def one_pass(total: int) -> list[int]:
        return [options.batch_size] * (total // options.batch_size) + [total % options.batch_size] * options.partial

    queues = [[size for size in one_pass(sum(own)) if size] * options.dsrepeat for own in mine]
    rounds = itertools.zip_longest(*queues, fillvalue=0)
    once = [size for turn in rounds for size in turn if size]
    taken = (once * options.repeat)[: options.nbatches]
    return Counter(taken), sum(taken)


def test_many_shards_and_ranks() -> None:
    random = np.random.default_rng(0)
    samples = random.integers(1, 2000, size=100_000)
    sizes = random.integers(1, 2**31, size=100_000)
    cluster = Cluster(nodes=1250, ranks_per_node=8)
    options = StreamOptions(batch_size=64, workers=8, nbatches=500, partial=True, repeat=2, dsrepeat=2)
    plan = plan_streams(samples, sizes, cluster, options)
    as_list = samples.tolist()
    for rank in random.choice(cluster.ranks, size=50, replace=False).tolist():
        sizes_of_batches, delivered = counted(as_list, rank, cluster.ranks, options)
        assert plan.partial_batches[rank].sum() == sum(n for size, n in sizes_of_batches.items() if size < 64)
        assert plan.delivered[rank].sum() == delivered
        assert plan.batches[rank] == sizes_of_batches.total()
        assert plan.samples[rank].sum() == sum(as_list[rank :: cluster.ranks])
    for node in (0, 17, 1249):
        ranks = range(8 * node, 8 * node + 8)
        assert plan.bytes_cached[node] == sum(sum(sizes[rank :: cluster.ranks].tolist()) for rank in ranks)
    assert plan.samples.sum() == samples.sum()
    assert plan.bytes_cached.sum() == sizes.sum()
    assert plan.hangs
    assert len(list(plan.describe())) < 20
    assert near(plan, "shards") == [80_000, 160_000]
    assert sorted(shard for _, _, own in plan.splits() for shard in own) == list(range(100_000))


def test_an_empty_shard_among_others_changes_nothing() -> None:
    options = StreamOptions(batch_size=2, workers=1)
    with_empty, without = planned([4, 4, 0, 2, 2], 1, options), planned([4, 4, 2, 2], 1, options)
    assert with_empty.batches.tolist() == without.batches.tolist() == [6]
    assert with_empty.delivered.tolist() == without.delivered.tolist() == [[12]]


def test_batches_that_no_worker_can_fill() -> None:
    plan = planned([3, 3, 2, 3], 2, StreamOptions(batch_size=4, workers=2, repeat=3, dsrepeat=5))
    assert not plan.batches.any()
    assert not plan.hangs
    assert "samples delivered: 0; never: at most 11; more than once: at most 0" in plan.describe()
    assert not any("nbatches" in way for way in plan.suggestions())
    assert "no rank gets a batch: every worker has fewer samples than one takes" in plan.describe()
    with pytest.raises(UserError, match="batch_size=4: no worker has more than 3 samples"):
        plan.refuse()
    kept = planned([3, 3, 2, 3], 2, StreamOptions(batch_size=4, workers=2, partial=True))
    assert kept.batches.tolist() == [2, 2]
    kept.refuse()


def test_nbatches_beyond_what_there_is_cuts_nothing() -> None:
    free, cut = (planned(PUBLISHED, 3, replace(SIMDIST, nbatches=number)) for number in (None, 999_999))
    assert cut.batches.tolist() == free.batches.tolist()
    assert cut.delivered.tolist() == free.delivered.tolist()


def test_partial_batches_are_no_hang_but_said() -> None:
    plan = planned([4, 3], 2, StreamOptions(batch_size=2, workers=0, partial=True))
    assert not plan.hangs
    plan.refuse()
    assert list(plan.describe())[-1].startswith("some batches are partial: where ranks' batches differ in size")


def test_bytes_of_nodes() -> None:
    sizes = np.array([1, 10, 100, 1000, 10_000, 100_000, 1_000_000, 10_000_000])
    options = StreamOptions(batch_size=2, workers=2, repeat=3)
    plan = plan_streams(np.full(8, 2), sizes, Cluster(nodes=2, ranks_per_node=2), options)
    assert plan.bytes_cached.tolist() == [110_011, 11_001_100]
    assert (1, 1, range(5, 8, 4)) in plan.splits()
    assert planned([2] * 8, 4, options).bytes_cached is None


def test_what_people_see() -> None:
    plan = planned(PUBLISHED, 3, SIMDIST)
    assert list(plan.describe(limit=2)) == [
        "10 shards with 920 samples; nodes x ranks x workers = 1 x 3 x 3; batches of 10",
        "  rank    shards       samples    batches  partial     delivered",
        "     0         4           373         36        0           360",
        "     1         3           277         26        0           260",
        "and 1 more with 26 batches each",
        "samples delivered: 880; never: at most 40; more than once: at most 0",
        f"DDP would hang, as ranks get different numbers of batches; {plan.advice}",
    ]
    good = "\n".join(planned(PUBLISHED, 3, replace(SIMDIST, nbatches=36, dsrepeat=2)).describe())
    assert good.endswith("every rank gets 36 batches")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: must be at least 1"),
        ({"workers": -1}, "workers=-1: must be at least 0"),
        ({"nbatches": 0}, "nbatches=0: must be at least 1"),
        ({"repeat": 0}, "repeat=0: must be at least 1"),  # for webdataset that would mean for ever
        ({"dsrepeat": 0}, "dsrepeat=0: must be at least 1"),
    ],
)
def test_numbers_out_of_range(changes: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(SIMDIST, **changes)


def test_ranks_that_cannot_be() -> None:
    for field in ("nodes", "ranks_per_node"):
        with pytest.raises(UserError, match=f"{field}=0: must be at least 1"):
            Cluster(**{field: 0})
