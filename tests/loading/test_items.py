"""Items of users' sets in loader processes: draws, own augmentation and collate, memory, mistakes."""

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import item_sets
import leaf_tasks
import numpy as np
import pytest
import torch
from cli import HELPERS

from flyte_ddp import arrays
from flyte_ddp.core.errors import MachineError, UserCodeError, UserError
from flyte_ddp.core.loading import workers as loading_workers
from flyte_ddp.core.loading.arrays import choose_device_of_arrays, open_array_batches
from flyte_ddp.core.loading.split import TargetSpec
from flyte_ddp.core.loading.user_functions import Augmentation, UserFunction
from flyte_ddp.core.loading.workers import LoaderPool
from flyte_ddp.core.machine import waiting
from flyte_ddp.core.order.sampling import ListedOrder, take_slice
from flyte_ddp.core.samples.leaves import name_leaves
from flyte_ddp.datasets.item_splits import get_item_facts
from flyte_ddp.datasets.items import ItemBatches, ItemLoader, Items
from flyte_ddp.datasets.on_demand_set import OnDemandSet

CPU = torch.device("cpu")
ORDER = ListedOrder(np.arange(40))


def table_of(samples: int) -> tuple[Any, Any]:
    rows = np.arange(samples)
    tokens = [[row] * (1 + row % 7) for row in range(samples)]
    return {"drawn": np.zeros((samples, 4)), "row": rows, "tokens": tokens}, rows % 3


TABLE = arrays(table_of(40), table_of(9))


@pytest.fixture(autouse=True)
def helpers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Own code is looked for in the working directory; what the marker holds up goes wrong."""
    monkeypatch.chdir(HELPERS)
    monkeypatch.setenv(item_sets.MARKER, str(tmp_path / "marker"))


def set_of(name: str) -> OnDemandSet:
    return OnDemandSet(f"item_sets:{name}", "", 40, 9, ("a", "b", "c"), "")


def loader_of(collate: str, augment: str = "", data: Any = None) -> ItemLoader:
    own = UserFunction("augment", f"item_sets:{augment}") if augment else None
    collate = collate if collate in ("padded", "stacked") else f"item_sets:{collate}"
    masked = "tokens" if collate == "padded" else None
    augmentation = Augmentation("none", 5, own)
    return ItemLoader(Items(data or set_of("drawing"), "train"), collate, 5, augmentation=augmentation, masked=masked)


DRAWING = {
    "padded": lambda: loader_of("padded"),
    "wrapped": lambda: loader_of("padded", data=set_of("wrapped")),
    "augmented": lambda: loader_of("padded", "add_noise"),
    "collated": lambda: loader_of("collate", "add_noise"),
    "arrays": lambda: loader_of("padded", "add_noise", TABLE),
}
# The samples of each batch of an epoch of which the ranks have shares.
BATCHES = np.array_split(np.random.default_rng(1).permutation(40), 3)


def load_epoch(source: ItemBatches, ranks: int, epoch: int | None) -> dict[int, list[float]]:
    """Return what was drawn for each sample, in batches that the ranks share."""
    shares = [take_slice(batch, rank, ranks) for batch in BATCHES for rank in range(ranks)]
    for share in shares:
        source.begin_batch(share, epoch)
    found = {}
    for share in shares:
        inputs = source.load_batch(share, epoch).inputs
        assert inputs["row"].tolist() == share.tolist()
        for row, tokens, drawn in zip(share.tolist(), inputs["tokens"], inputs["drawn"], strict=True):
            assert tokens.tolist() == [row] * (1 + row % 7) + [0] * (tokens.shape[0] - 1 - row % 7)
            found[row] = drawn.tolist()
    return found


@pytest.mark.slow
def test_draws_depend_on_the_sample_and_the_epoch_alone() -> None:
    """With 0 and 3 loader processes, and 1 to 3 ranks; in evaluations they are always the same.

    pytorch/pytorch#5059, #3880, xingyizhou/CenterNet#233, facebookresearch/fairseq#1383: equal seeds of NumPy.
    huggingface/datasets#6673, starVLA/starVLA#470: processes do not see the epoch.
    albumentations-team/albumentations#2559, AlbumentationsX#266: a transform has a generator of its own.
    """
    expected: dict[tuple[str, int | None], dict[int, list[float]]] = {}
    for workers in (0, 3):
        loaders = {name: make() for name, make in DRAWING.items()}
        pool = LoaderPool([*loaders.values()], workers) if workers else None
        for name, loader in loaders.items():
            source = ItemBatches(loader, pool, CPU)
            for ranks, epoch in ((1, 0), (3, 0), (2, 1), (2, None)):
                found = load_epoch(source, ranks, epoch)
                assert found == expected.setdefault((name, epoch), found), (name, workers, ranks, epoch)
        if pool:
            pool.close()
    for (name, epoch), found in expected.items():
        columns = [*zip(*found.values(), strict=True)]
        if name != "arrays" or epoch is not None:  # which draw in augmentation alone
            assert all(len({*column}) > 35 for column in columns[:3]), "other ones for each sample"
            assert epoch == 0 or all(found[row][0] != expected[name, 0][row][0] or epoch is None for row in found)
    assert expected["padded", 0] == expected["wrapped", 0]
    assert expected["padded", 0] != expected["padded", 1] != expected["augmented", 1]


def test_each_process_makes_the_same_sets() -> None:
    """Else samples of the test side would be trained on in another process."""
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    one, other = (set_of("shuffled").sets for _ in range(2))
    assert (one.train, one.test) == (other.train, other.test)
    assert sorted(row for row, _ in one.train + one.test) == [*range(49)]
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    assert before == after, "the process's own generators are as they were"


def test_what_own_code_changes_in_place_stays_in_its_batch() -> None:
    loader = loader_of("collate", "add_noise", TABLE)
    first, again = (ItemBatches(loader, None, CPU).load_batch(np.arange(9), 0) for _ in range(2))
    assert torch.equal(first.inputs["drawn"], again.inputs["drawn"])
    assert not TABLE.train_inputs["drawn"].any()


@pytest.mark.parametrize(
    ("name", "collate"),
    [
        ("texts", "padded"),
        ("series", "padded"),
        ("table", "stacked"),
        ("table", "padded"),
        ("pairs", "stacked"),
        ("reviews", "padded"),
    ],
)
def test_arrays_are_batched_as_their_items_are(name: str, collate: str) -> None:
    """So that training with an own augmentation, and evaluations without, give the model the same leaves."""
    data = getattr(leaf_tasks, name)("")
    facts = get_item_facts(data, "train", ORDER, collate, 0)
    of_arrays = open_array_batches(CPU, data.train_inputs, data.train_targets, masked=facts.masked)
    items = ItemBatches(ItemLoader(Items(data, "train"), collate, 0, masked=facts.masked), None, CPU)
    for samples in (np.arange(8), np.array([40]), np.array([3, 3, 0])):
        for ours, theirs in zip(of_arrays.load_batch(samples)[:2], items.load_batch(samples, None)[:2], strict=True):
            torch.testing.assert_close(name_leaves(ours), name_leaves(theirs), rtol=0, atol=0, equal_nan=True)


def test_types_of_samples_do_not_change_a_batch() -> None:
    """An empty list is an array of floats; a whole number beside floats is one; what is not in order is."""
    data = [(([], 1), 0), (([1, 2], 0.5), 1), ((np.array([3, 4, 5])[::-1], np.float64(2)), 1)]
    loader = ItemLoader(ListItems(data), "padded", 0, masked="0")  # type: ignore[arg-type]
    (tokens, numbers, mask), targets = loader.load_items([0, 1, 2], None)
    assert (tokens.dtype, tokens.tolist()) == (torch.int64, [[0, 0, 0], [1, 2, 0], [5, 4, 3]])
    assert (numbers.dtype, numbers.tolist()) == (torch.float32, [1.0, 0.5, 2.0])
    assert (targets.dtype, mask.sum(1).tolist()) == (torch.int64, [0, 2, 3])


def test_the_mask_of_a_dict_that_has_a_mask_is_its_own() -> None:
    data = [({"tokens": [1] * length, "mask": [False] * length}, 0) for length in (1, 3)]
    inputs, _ = ItemLoader(ListItems(data), "padded", 0, masked="tokens").load_items([0, 1], None)  # type: ignore[arg-type]
    assert {name: leaf.tolist() for name, leaf in inputs.items()} == {
        "tokens": [[1, 0, 0], [1, 1, 1]],
        "mask": [[False] * 3] * 2,
    }


def test_the_type_of_a_leaf_is_one_for_the_whole_set() -> None:
    """Not the batch's, which would depend on the samples of a rank, and so on the number of ranks."""
    data = set_of("numbers")
    facts = get_item_facts(data, "train", ORDER, "stacked", 0)
    loader = ItemLoader(Items(data, "train"), "stacked", 0, types=facts.types)
    for samples in ([0, 1], [0, 2], [3], [2, 3]):
        inputs, _ = loader.load_items(samples, None)
        assert inputs.dtype == torch.float32
        assert inputs.tolist() == [data.sets.train.rows[sample] for sample in samples]


def test_a_fraction_among_whole_numbers_is_named() -> None:
    data = set_of("whole_numbers")
    facts = get_item_facts(data, "train", ORDER, "stacked", 0)
    loader = ItemLoader(Items(data, "train"), "stacked", 0, types=facts.types)
    assert loader.load_items([6, 8], None)[0].tolist() == [[6, 1], [2, 1]]
    rule = r"the inputs of train sample 9 have fractions.* whole numbers; "
    for samples in ([9], [8, 9, 10]):
        with pytest.raises(UserError, match=f"^{rule}give all samples one type"):
            loader.load_items(samples, None)


class ListItems:
    """Items of a list."""

    side = "train"

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def read_item(self, sample: int, seed: int, epoch: int | None) -> Any:
        return self.items[sample]

    def name_samples(self, samples: list[int]) -> list[str]:
        return []


ONE = (np.ones(3), 0)


@pytest.mark.parametrize(
    ("items", "collate", "words"),
    [
        (
            [ONE, (np.ones(2), 0)],
            "stacked",
            r" have shape \[2\], and those of train sample 0 \[3\]: set collate='padded'",
        ),
        ([(np.ones((2, 3)), 0), (np.ones((2, 4)), 0)], "padded", r" have shape \[2, 4\], .*: only the first dimension"),
        ([ONE, ((np.ones(3),) * 2, 0)], "padded", " are a tuple of 2, .*train sample 0 are one array"),
        ([ONE, ({"b": 1}, 0)], "stacked", " are a dict with b, .*train sample 0 are one array"),
        ([ONE, ("text", 0)], "stacked", ": must be numbers or truth values, got texts; convert"),
        ([ONE, ([[1], [1, 2]], 0)], "padded", ": is not an array .*inhomogen"),
    ],
)
def test_items_that_make_no_batch_are_told_with_the_sample(items: list[Any], collate: str, words: str) -> None:
    loader = ItemLoader(ListItems(items), collate, 0, masked="")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"the inputs of train sample 1{words}"):
        loader.load_items([0, 1], None)


MISTAKES = {
    "collate_nothing": (UserError, "collate='item_sets:collate_nothing' returned a NoneType for train sample 16 to"),
    "collate_texts": (UserError, "collate='item_sets:collate_texts' returned inputs without a tensor for train"),
    "leave_one_out": (UserError, r"returned targets \[1\] for .*: must have a row for each of the 2 samples"),
    "fail_to_collate": (UserCodeError, 'on train sample 16 to train sample 17: KeyError: "the collate\'s own words"'),
    "out_of_memory": (UserCodeError, "on train sample 16 to train sample 17: MemoryError"),
    "not_there": (UserError, "has no 'not_there'"),
}
GROWING = arrays(([np.full(length, length) for length in range(1, 4001)], None), ([[1]], None))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("stuck", "dataset='item_sets:stuck': train sample 17"),
        ("stuck_for_good", "a batch from loader processes"),
    ],
)
def test_a_sample_that_never_comes_is_named_with_the_stack(name: str, what: str, monkeypatch) -> None:
    monkeypatch.setattr(waiting, "limit_seconds", 0.5)
    loader = ItemLoader(Items(set_of(name), "train"), "stacked", 0)
    with closing(LoaderPool([loader], 2)) as pool:
        monkeypatch.setattr(loading_workers, "GRACE_SECONDS", 60.0)  # on a busy machine
        for call in [pool.submit_call(loader.load_items, [1, 2], None) for _ in range(2)]:
            assert len(pool.wait_for_result(call)[0]) == 2
        monkeypatch.setattr(loading_workers, "GRACE_SECONDS", 60.0 if name == "stuck" else 0.5)
        with pytest.raises(MachineError, match=rf"^{what} was not ready within 0.5 s \(FLYTE_DDP_TIMEOUT\)") as caught:
            pool.wait_for_result(pool.submit_call(loader.load_items, [16, 17], None))
    [first, *_] = caught.value.__notes__
    assert "item_sets.py" in first
    assert "in __getitem__" in first
    if name == "stuck":  # in the rank itself
        with pytest.raises(MachineError, match=rf"^{what} was not ready within 0.5 s"):
            loader.load_items([17], None)


def test_a_loader_process_that_has_not_started_in_time_is_said(monkeypatch) -> None:
    for name in ("START_SECONDS", "GRACE_SECONDS"):
        monkeypatch.setattr(loading_workers, name, 0.0)
    monkeypatch.setattr(waiting, "limit_seconds", 0.0)
    loader = ItemLoader(Items(set_of("stuck"), "train"), "stacked", 0)
    with (
        closing(LoaderPool([loader], 1)) as pool,
        pytest.raises(MachineError, match=r"^a loader process has not started within 0 s$"),
    ):
        pool.wait_for_result(pool.submit_call(loader.load_items, [1, 2], None))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoaderPool]:
    """Two processes for the tests below, which must not end them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(HELPERS)
        patch.setenv(item_sets.MARKER, str(tmp_path_factory.mktemp("pool") / "marker"))
        loaders = {
            "failing": loader_of("padded", data=set_of("failing")),
            "changing": loader_of("padded", data=set_of("changing")),
            "growing": ItemLoader(Items(GROWING, "train"), "padded", 0, masked=""),
            **{name: loader_of(name) for name in ("collate", "collate_graphs", *MISTAKES)},
        }
        made = LoaderPool([*loaders.values()], 2)
        made.named = loaders  # type: ignore[attr-defined]
        yield made
        made.close()


def both_ways(pool: LoaderPool, name: str) -> list[ItemBatches]:
    """The source of a loader by its name, in the rank and in processes."""
    return [ItemBatches(pool.named[name], each, CPU) for each in (None, pool)]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_mistakes_are_told_with_the_samples(pool: LoaderPool) -> None:
    """In the rank and by a loader process alike, with the user's own exception as cause or in the note."""
    for name, (kind, words) in MISTAKES.items():
        for source in both_ways(pool, name):
            with pytest.raises(kind, match=words) as raised:
                source.load_batch(np.array([16, 17]), 0)
            if name == "fail_to_collate":
                notes = "".join(getattr(raised.value, "__notes__", ()))
                assert "in fail_to_collate\n    raise KeyError" in notes or source.pool is None
    for source in both_ways(pool, "failing"):
        with pytest.raises(
            UserCodeError, match="'item_sets:failing': train sample 19: IndexError: the set's own words"
        ):
            source.load_batch(np.array([16, 19]), 0)
    for source in both_ways(pool, "changing"):
        with pytest.raises(UserError, match=r"has 39 and 9 samples now, .*had 40 and 9 samples"):
            source.load_batch(np.array([16, 17]), 0)


@pytest.mark.slow
def test_texts_and_nothing_pass_through_an_own_collate(pool: LoaderPool) -> None:
    for source in both_ways(pool, "collate"):
        inputs, targets, _ = source.load_batch(np.array([4, 2]), 0)
        assert (inputs["text"], inputs["nothing"]) == (["row 4", "row 2"], None)
        assert (inputs["bf16"].dtype, inputs["bf16"].tolist()) == (torch.bfloat16, [1, 1])
        assert targets.tolist() == [1, 2]
    facts = get_item_facts(set_of("drawing"), "train", ORDER, "item_sets:collate", 0)
    kinds = {name: leaf.dtype for name, leaf in facts.inputs.leaves}
    assert [kinds[name] for name in ("tokens", "drawn", "text", "nothing", "bf16")] == [
        *("int64", "float", "other", "other", "float")
    ]
    assert facts.targets == TargetSpec(np.dtype(np.int64), ())


@pytest.mark.slow
def test_batches_of_own_classes_are_moved_to_the_device(pool: LoaderPool) -> None:
    for source in both_ways(pool, "collate_graphs"):
        inputs, _, _ = source.load_batch(np.array([4, 2]), 0)
        assert (type(inputs).__name__, inputs.device) == ("Graphs", source.device)
        assert inputs.nodes.tolist() == [1, 1]


@pytest.mark.slow
def test_the_memory_grows_and_a_batch_that_is_kept_is_not_overwritten(pool: LoaderPool) -> None:
    """Batches of 1 to 300 kB in any order; each third one is kept."""
    in_rank, source = both_ways(pool, "growing")
    ends = np.random.default_rng(2).permutation(np.arange(20, 4000, 130))
    shares = [np.arange(end - 10, end) for end in ends]
    before, kept = len(pool.memories), []
    for place, share in enumerate(shares):
        for later in shares[place : place + 4]:
            source.begin_batch(later, 0)
        batch = source.load_batch(share, 0)
        if place % 3 == 0:
            kept.append((share, batch))
    for share, batch in kept:
        for leaf, expected in zip(batch.inputs, in_rank.load_batch(share, 0).inputs, strict=True):
            assert torch.equal(leaf, expected)
    assert len(pool.memories) - before <= len(kept) + 5, "others are used again"


def test_facts_of_sets_on_demand() -> None:
    """What differs between samples has no size; the mask is of the first such input."""
    facts = get_item_facts(set_of("drawing"), "train", ORDER, "padded", 0)
    leaves = dict(facts.inputs.leaves)
    assert (leaves["tokens"].shape, leaves["row"].shape, facts.masked) == ((None,), (), "tokens")
    assert facts.targets == TargetSpec(np.dtype(np.int64), ())
    with pytest.raises(UserError, match="the inputs of dataset='item_sets:drawing' have different lengths"):
        get_item_facts(set_of("drawing"), "train", ORDER, "stacked", 0)


def test_arrays_without_room_on_a_gpu_stay_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (400, 800))
    assert choose_device_of_arrays(gpu, 100) == gpu
    assert choose_device_of_arrays(gpu, 101) == CPU
    assert choose_device_of_arrays(CPU, 101) == CPU
