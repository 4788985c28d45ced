"""The planner of shard streams against webdataset's own loaders, which really read shards and count their batches."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset as wds
from hypothesis import given, settings
from hypothesis import strategies as st

from flyte_ddp.errors import UserError
from flyte_ddp.shards.epoch_plan import Cluster
from flyte_ddp.shards.stream_plan import StreamOptions, StreamPlan, plan_streams

pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),  # webdataset leaves shards to be collected
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),  # it forks workers
    pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning"),  # of few cores
]

Run = tuple[list[int], Cluster, StreamOptions]  # with the samples of its shards
Key = str
Batch = tuple[int, list[Key]]  # the reader it comes from, and the samples' keys
Splitter = Callable[[Iterable[dict[str, str]]], Iterator[dict[str, str]]]

# The shards of simdist.py are no longer to be had, nor are their lengths written anywhere. With these it prints the
# counts it is known for, 36, 26 and 26, when run with its defaults.
PUBLISHED = [93, 95, 91, 94, 88, 92, 96, 94, 87, 90]
SIMDIST = StreamOptions(batch_size=10, workers=3)


@dataclass(frozen=True)
class Shards:
    """Tiny shards, written when first asked for; no two places in a list share a file, nor samples a key."""

    folder: Path

    def __call__(self, samples: list[int]) -> list[str]:
        return [self.written(place, number) for place, number in enumerate(samples)]

    def written(self, place: int, number: int) -> str:
        path = self.folder / f"{place:02d}-{number}.tar"
        if not path.exists():
            with wds.TarWriter(str(path)) as writer:
                for sample in range(number):
                    writer.write({"__key__": f"{place}-{sample}", "cls": "1"})
        return str(path)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    return Shards(tmp_path_factory.mktemp("shards"))


def every(part: int, parts: int, seen: list[str] | None = None) -> Splitter:
    """simdist.py's way of splitting, ``urls[part::parts]``; what goes through is added to ``seen``."""

    def split(urls: Iterable[dict[str, str]]) -> Iterator[dict[str, str]]:
        for url in itertools.islice(urls, part, None, parts):
            if seen is not None:
                seen.append(url["url"])
            yield url

    return split


def dataset(urls: list[str], options: StreamOptions, *, by_rank: Splitter, by_worker: Splitter, buffer: int) -> Any:
    """simdist.py's dataset, which gives keys in place of images."""
    made = (
        wds.WebDataset(urls, shardshuffle=False, nodesplitter=by_rank, workersplitter=by_worker)
        .shuffle(buffer)
        .to_tuple("__key__")
        .batched(options.batch_size, partial=options.partial)
    )
    return made.repeat(options.dsrepeat) if options.dsrepeat > 1 else made


def loaded(urls: list[str], rank: int, ranks: int, options: StreamOptions, buffer: int) -> list[list[Key]]:
    """A rank's batches, from simdist.py's loader with its worker processes."""
    stream = dataset(urls, options, by_rank=every(rank, ranks), by_worker=wds.split_by_worker, buffer=buffer)
    loader = wds.WebLoader(stream, num_workers=options.workers, batch_size=None)
    if options.repeat > 1:
        loader = loader.repeat(nepochs=options.repeat)
    return [keys for [keys] in itertools.islice(loader, options.nbatches)]


def dealt(
    urls: list[str], rank: int, ranks: int, options: StreamOptions, buffer: int, opened: list[list[str]]
) -> list[Batch]:
    """The same without processes: each worker's dataset is read here, and their batches are dealt as the loader does.

    What each worker opens is added to its list of ``opened``.
    """
    readers = max(options.workers, 1)
    splitters = [every(reader, readers, opened[reader]) for reader in range(readers)]
    streams = [
        dataset(urls, options, by_rank=every(rank, ranks), by_worker=splitter, buffer=buffer) for splitter in splitters
    ]

    def one_pass() -> Iterator[Batch]:
        turns = itertools.zip_longest(*([(reader, keys) for (keys,) in one] for reader, one in enumerate(streams)))
        yield from (batch for turn in turns for batch in turn if batch is not None)

    return list(itertools.islice(wds.DataPipeline(one_pass).repeat(options.repeat), options.nbatches))


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


@settings(max_examples=150, derandomize=True, deadline=None)
@given(run=runs(), buffer=st.sampled_from([0, 1000]))
def test_the_plan_is_what_loaders_give(shards: Shards, run: Run, buffer: int) -> None:
    samples, cluster, options = run
    urls = shards(samples)
    sizes = np.array([Path(url).stat().st_size for url in urls])
    plan = plan_streams(np.array(samples), sizes, cluster, options)
    ranks, readers = plan.samples.shape
    opened = [[[] for _ in range(readers)] for _ in range(ranks)]
    batches = [dealt(urls, rank, ranks, options, buffer, opened[rank]) for rank in range(ranks)]

    sizes_of_batches = [[len(keys) for _, keys in of_rank] for of_rank in batches]
    assert plan.batches.tolist() == list(map(len, sizes_of_batches))
    assert plan.hangs == (len(set(map(len, sizes_of_batches))) > 1)
    uneven = any(len(set(step)) > 1 for step in zip(*sizes_of_batches, strict=False))
    assert plan.partial_batches.any() or not uneven

    different = set()
    for rank, reader in np.ndindex(ranks, readers):
        mine = [keys for of_reader, keys in batches[rank] if of_reader == reader]
        different |= (of_one := {key for keys in mine for key in keys})
        assert plan.reader_batches[rank, reader] == len(mine)
        assert plan.partial_batches[rank, reader] == sum(len(keys) < options.batch_size for keys in mine)
        assert plan.delivered[rank, reader] == sum(map(len, mine))
        assert plan.different[rank, reader] <= len(of_one)
        assert buffer or plan.different[rank, reader] == len(of_one)
    assert plan.different.sum() <= len(different)

    if options.nbatches is None:
        # With nbatches the datasets above would be read on to the end all the same.
        for rank, reader, own in plan.splits():
            in_order = [urls[shard] for shard in own]
            assert opened[rank][reader] == in_order * (len(opened[rank][reader]) // len(in_order))
        nodes = np.array_split(np.arange(ranks), cluster.nodes)
        by_node = [{url for rank in node for urls_ in opened[rank] for url in urls_} for node in nodes]
        assert plan.bytes_cached.tolist() == [sum(Path(url).stat().st_size for url in node) for node in by_node]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("samples", "options"),
    [
        pytest.param([5, 4, 7, 3, 9], StreamOptions(batch_size=2, workers=0, repeat=2), id="no workers"),
        pytest.param(
            [9, 9, 1, 2, 7, 4, 6, 6, 1, 8],
            StreamOptions(batch_size=3, workers=3, repeat=2, dsrepeat=2),
            id="a worker without a batch",
        ),
        pytest.param(
            [20, 9, 3, 5, 2, 7], StreamOptions(batch_size=2, workers=3, partial=True, dsrepeat=3), id="ragged ends"
        ),
        pytest.param(
            [9, 8, 7, 6, 9, 3],
            StreamOptions(batch_size=2, workers=2, partial=True, repeat=3, nbatches=17),
            id="cut off",
        ),
    ],
)
def test_processes_deal_batches_in_the_same_order(shards: Shards, samples: list[int], options: StreamOptions) -> None:
    """What the many cases above rest on: worker processes give just what is dealt here without them."""
    urls, ranks = shards(samples), 2
    plan = planned(samples, ranks, options)
    for rank in range(ranks):
        batches = loaded(urls, rank, ranks, options, buffer=0)
        alike = dealt(urls, rank, ranks, options, buffer=0, opened=[[] for _ in range(plan.options.readers)])
        assert batches == [keys for _, keys in alike]
        assert len(batches) == plan.batches[rank]


CASES = {
    "defaults": (SIMDIST, [36, 26, 26]),
    "nbatches 26": (replace(SIMDIST, nbatches=26), [26] * 3),
    "nbatches 36, dsrepeat 2": (replace(SIMDIST, nbatches=36, dsrepeat=2), [36] * 3),
    "nbatches 32, dsrepeat 2": (replace(SIMDIST, nbatches=32, dsrepeat=2), [32] * 3),
}


@pytest.mark.parametrize(("options", "batches"), CASES.values(), ids=CASES)
def test_the_published_cases(options: StreamOptions, batches: list[int]) -> None:
    plan = planned(PUBLISHED, 3, options)
    assert plan.batches.tolist() == batches
    assert plan.hangs == (len(set(batches)) > 1)
    assert not plan.partial_batches.any()


@pytest.mark.slow
@pytest.mark.parametrize(("options", "batches"), CASES.values(), ids=CASES)
def test_the_published_cases_with_real_loaders(shards: Shards, options: StreamOptions, batches: list[int]) -> None:
    urls = shards(PUBLISHED)
    counts = [Counter(map(len, loaded(urls, rank, 3, options, buffer=1000))) for rank in range(3)]
    assert counts == [Counter({10: number}) for number in batches]


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


def test_a_worker_without_samples_is_an_error_as_it_is_in_webdataset(shards: Shards) -> None:
    options = StreamOptions(batch_size=2, workers=2)
    for samples, ranks, message in (
        ([5], 1, "1 shards for ranks x workers = 1 x 2: .* at most 1 workers, or at least 2 shards"),
        ([5, 5, 5], 2, "3 shards for ranks x workers = 2 x 2: .* at most 1 workers, or at least 4 shards"),
        ([5], 2, "1 shards for ranks x workers = 2 x 2: .* at most 1 ranks, or at least 4 shards"),
        ([5, 5, 5, 0], 2, "all shards of rank 1's worker 1 are empty: "),
        ([5, 0], 1, "all shards of rank 0's worker 1 are empty: "),
    ):
        with pytest.raises(UserError, match=message):
            planned(samples, ranks, options)
        with pytest.raises(ValueError, match="No samples found in dataset; perhaps you have fewer shards than workers"):
            dealt(shards(samples), ranks - 1, ranks, options, 0, opened=[[], []])


def test_without_its_check_webdataset_ends_at_once_however_often_it_repeats(shards: Shards) -> None:
    """So a rank without shards would leave the others alone, and a worker without any would go unnoticed."""
    empty = wds.WebDataset(
        shards([5]), shardshuffle=False, nodesplitter=every(1, 2), workersplitter=None, empty_check=False
    )
    assert list(empty.repeat()) == []


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
