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
from stream_plans import PUBLISHED, SIMDIST, Run, planned, runs

from flyte_ddp.errors import UserError
from flyte_ddp.shards.stream_plan import StreamOptions, plan_streams

pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),  # webdataset leaves shards to be collected
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),  # it forks workers
    pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning"),  # of few cores
]

Key = str
Batch = tuple[int, list[Key]]  # the reader it comes from, and the samples' keys
Splitter = Callable[[Iterable[dict[str, str]]], Iterator[dict[str, str]]]


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


@pytest.mark.slow
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
