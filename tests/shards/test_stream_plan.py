"""The plan of a stream against simdist.py's published counts and webdataset's own loaders."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import webdataset as wds
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from flyte_ddp.core.errors import UserError
from flyte_ddp.shards.__main__ import shards as shards_command
from flyte_ddp.shards.stream_plan import Loaders, StreamPlan

# The shards of simdist.py are no longer to be had, nor are their lengths written anywhere. With these it prints the
# counts it is known for, 36, 26 and 26, when run with its defaults.
PUBLISHED = [93, 95, 91, 94, 88, 92, 96, 94, 87, 90]
SIMDIST = Loaders(ranks=3, batch_size=10, workers=3)
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),  # webdataset leaves shards to be collected
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),  # it forks workers
    pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning"),  # of few cores
]

Batches = list[list[str]]  # keys of samples
Shards = Callable[[list[int]], list[str]]


def test_the_published_mistake_is_refused_with_the_published_fixes() -> None:
    plan = StreamPlan(SIMDIST, np.array(PUBLISHED))
    assert plan.batches.tolist() == [36, 26, 26]
    assert plan.suggest_option_changes()[:2] == [{"nbatches": 26}, {"nbatches": 36, "dsrepeat": 2}]
    with pytest.raises(UserError, match=r"the ranks get 26 to 36 batches: .* use nbatches=26, or nbatches=36 with"):
        plan.require_equal_batch_counts()
    for way in ({"nbatches": 26}, {"nbatches": 36, "dsrepeat": 2}):
        fixed = StreamPlan(replace(SIMDIST, **way), np.array(PUBLISHED))
        fixed.require_equal_batch_counts()
        assert fixed.batches.tolist() == [way["nbatches"]] * 3


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
    loaders = Loaders(
        ranks=ranks, batch_size=batch_size, workers=workers, nbatches=nbatches, partial=partial, repeat=repeat
    )
    present = StreamPlan(loaders, np.array(counts))
    for way in present.suggest_option_changes():
        assert StreamPlan(replace(loaders, **way), np.array(counts)).is_exact
        if way.keys() == {"nbatches"} and present.batches.min() != present.batches.max():
            assert not StreamPlan(replace(loaders, nbatches=way["nbatches"] + 1), np.array(counts)).is_exact


def test_the_command_prints_the_plan_and_fails_where_ddp_would_hang() -> None:
    command = ["plan", "--shards", "9", "--samples", "100", "--ranks", "3", "--workers", "3", "--batch-size", "10"]
    said = CliRunner().invoke(shards_command, command)
    assert (said.exit_code, said.output.splitlines()[-1]) == (0, "every rank gets 30 batches")
    said = CliRunner().invoke(shards_command, [*command[:2], "10", *command[3:]])
    assert said.exit_code == 1
    assert "rank 0: 400 samples, 40 batches" in said.output


def test_batches_that_no_worker_can_fill() -> None:
    few = Loaders(ranks=2, batch_size=4, workers=2, dsrepeat=5)
    plan = StreamPlan(few, np.array([3, 3, 2, 3]))
    assert not any("nbatches" in way for way in plan.suggest_option_changes())
    with pytest.raises(UserError, match="batch_size=4: no worker has more than 3 samples"):
        plan.require_equal_batch_counts()
    assert StreamPlan(replace(few, partial=True), plan.counts).batches.tolist() == [10, 10]


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


def dataset(urls: list[str], rank: int, loaders: Loaders, by_worker: Callable[..., Any]) -> Any:
    """simdist.py's dataset, which gives keys in place of images."""
    read = wds.WebDataset(urls, shardshuffle=False, nodesplitter=every(rank, loaders.ranks), workersplitter=by_worker)
    made = read.shuffle(10).to_tuple("__key__").batched(loaders.batch_size, partial=loaders.partial)
    return made.repeat(loaders.dsrepeat) if loaders.dsrepeat > 1 else made


def load_in_processes(urls: list[str], rank: int, loaders: Loaders) -> Batches:
    """A rank's batches, from simdist.py's loader with its worker processes."""
    urls_of_worker = dataset(urls, rank, loaders, wds.split_by_worker)
    return [keys for [keys] in wds.WebLoader(urls_of_worker, num_workers=loaders.workers, batch_size=None)]


def load_here(urls: list[str], rank: int, loaders: Loaders) -> Batches:
    """The same without processes: each worker's dataset is read here; their batches are dealt as the loader does."""
    workers = max(1, loaders.workers)
    streams = [dataset(urls, rank, loaders, every(worker, workers)) for worker in range(workers)]

    def one_pass() -> Iterator[list[str]]:
        turns = itertools.zip_longest(*([keys for (keys,) in stream] for stream in streams))
        yield from (batch for turn in turns for batch in turn if batch is not None)

    return list(itertools.islice(wds.DataPipeline(one_pass).repeat(loaders.repeat), loaders.nbatches or None))


def check_against(plan: StreamPlan, urls: list[str], load: Callable[[list[str], int, Loaders], Batches]) -> None:
    """Compare the plan with what ranks get: numbers of batches, and with whole passes the samples in them."""
    loaders = plan.loaders
    for rank in range(loaders.ranks):
        batches = load(urls, rank, loaders)
        assert plan.batches[rank] == len(batches)
        assert {len(batch) for batch in batches} <= {loaders.batch_size} or loaders.partial
        if loaders.partial and not loaders.nbatches:
            times = Counter(key for batch in batches for key in batch)
            assert set(times.values()) <= {loaders.repeat * loaders.dsrepeat}
            assert len(times) == plan.samples[rank].sum()


@pytest.mark.slow
@settings(max_examples=40, derandomize=True, deadline=None)
@given(data=st.data())
def test_the_plan_is_what_loaders_give(shards: Shards, data: st.DataObject) -> None:
    draw = data.draw
    loaders = Loaders(
        ranks=draw(st.integers(1, 4)),
        batch_size=draw(st.integers(1, 6)),
        workers=draw(st.integers(0, 3)),
        nbatches=draw(st.integers(0, 20)),
        partial=draw(st.booleans()),
        repeat=draw(st.integers(1, 3)),
        dsrepeat=draw(st.integers(1, 3)),
    )
    readers = loaders.ranks * max(1, loaders.workers)
    counts = draw(st.lists(st.integers(1, 7), min_size=readers, max_size=readers))
    counts += draw(st.lists(st.integers(0, 7), max_size=6))  # each reader has a sample, but there may be empty shards
    check_against(StreamPlan(loaders, np.array(counts)), shards(counts), load_here)


@pytest.mark.slow
def test_processes_give_what_is_planned(shards: Shards) -> None:
    """What the many cases above rest on: worker processes give just what is dealt here without them."""
    check_against(StreamPlan(SIMDIST, np.array(PUBLISHED)), shards(PUBLISHED), load_in_processes)


def test_a_worker_without_samples_is_an_error_as_it_is_in_webdataset(shards: Shards) -> None:
    for counts, ranks, said in (
        ([5], 2, "1 shards for ranks x workers = 2 x 2: .* or at least 4 shards"),
        ([5, 5, 5, 0], 2, "all shards of rank 1's worker 1 are empty: "),
    ):
        loaders = Loaders(ranks=ranks, batch_size=2, workers=2)
        with pytest.raises(UserError, match=said):
            StreamPlan(loaders, np.array(counts))
        with pytest.raises(ValueError, match="No samples found in dataset; perhaps you have fewer shards than workers"):
            load_here(shards(counts), ranks - 1, loaders)
