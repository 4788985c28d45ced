"""Data sets of any leaves: what arrays() and pairs of map-style sets may hold, how they are kept, what is refused."""

import base64
import pickle
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import leaf_tasks as tasks
import numpy as np
import pytest
import torch
from cli import HELPERS
from scipy import sparse

from flyte_ddp import arrays
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.progress import Progress
from flyte_ddp.core.samples.leaves import get_leaves_form, name_leaves
from flyte_ddp.datasets import fetch, image_arrays, open_prepared
from flyte_ddp.datasets.collate import collate_samples
from flyte_ddp.datasets.custom import make_arrays_from_user_result
from flyte_ddp.datasets.items import Items
from flyte_ddp.datasets.prepared import check_prepared_set
from flyte_ddp.datasets.prepared_folder import read_description
from flyte_ddp.datasets.prepared_set import write_prepared_set
from flyte_ddp.datasets.sample_arrays import SampleArrays, arrays_sha256, open_arrays


class Frame:
    """Becomes an array as data frames and series of pandas do."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.values, dtype)


N = 6
NUMBERS = np.random.default_rng(0).normal(size=(N, 3))
TOKENS = [[1, 2, 3], [], [4], [5, 6], [7], [0]]
CLASSES = np.arange(N) % 2
# What is given for a leaf, what is kept of each sample, and of which type.
LEAVES: dict[str, tuple[Any, Any, str]] = {
    "floats": (NUMBERS, NUMBERS.astype(np.float32), "float32"),
    "of another byte order": (np.arange(N, dtype=">i4"), np.arange(N), "int32"),
    "not in C order": (np.asfortranarray(NUMBERS), NUMBERS.astype(np.float32), "float32"),
    "unsigned": (np.arange(N, dtype=np.uint16), np.arange(N), "int32"),
    "truth values": ([True, False] * 3, [True, False] * 3, "bool"),
    "tensor": (torch.from_numpy(NUMBERS), NUMBERS.astype(np.float32), "float32"),
    "list of tensors": ([torch.tensor(row) for row in NUMBERS], NUMBERS.astype(np.float32), "float32"),
    "data frame": (Frame(NUMBERS), NUMBERS.astype(np.float32), "float32"),
    "lists of different lengths": (TOKENS, TOKENS, "int64"),
    "arrays of different lengths": (
        [NUMBERS[:length] for length in range(N)],
        [NUMBERS[:length].astype(np.float32) for length in range(N)],
        "float32",
    ),
    "tensors of different lengths": ([torch.tensor(each) for each in TOKENS], TOKENS, "int64"),
}


def keep(data: SampleArrays, folder: Path) -> SampleArrays:
    """Write a data set, and open what was written."""
    folder.mkdir()
    write_prepared_set(data, folder, {})
    return open_arrays(folder)


@pytest.mark.parametrize("kind", LEAVES)
def test_a_leaf_is_kept_as_it_was_given(kind: str, tmp_path: Path) -> None:
    given, expected, dtype = LEAVES[kind]
    kept = keep(arrays((given, CLASSES), (given, CLASSES)), tmp_path / "data")
    for leaf in (kept.train_inputs, kept.test_inputs):
        assert (len(leaf), leaf.dtype) == (N, dtype)
        for array in (leaf,) if isinstance(leaf, np.ndarray) else (leaf.values, leaf.ends):
            assert isinstance(array, np.memmap)
            assert not array.flags.writeable
        for sample, value in enumerate(expected):
            np.testing.assert_array_equal(leaf[sample], value)


def test_forms_of_inputs_and_targets_are_kept(tmp_path: Path) -> None:
    several = {"tokens": TOKENS, "numbers": NUMBERS}
    for number, (inputs, targets) in enumerate(
        ((NUMBERS, None), ((NUMBERS, TOKENS), TOKENS), (several, (CLASSES, NUMBERS)), (NUMBERS, several))
    ):
        kept = keep(arrays((inputs, targets), (inputs, targets)), tmp_path / str(number))
        for sample in range(N):
            found = Items(kept, "test").read_item(sample, 0, None)
            for leaves, given in zip(found, (inputs, targets), strict=True):
                assert get_leaves_form(leaves) == get_leaves_form(given)
                assert [*name_leaves(leaves)] == [*name_leaves(given)]
                for leaf, expected in zip(name_leaves(leaves).values(), name_leaves(given).values(), strict=True):
                    np.testing.assert_array_equal(leaf, np.asarray(expected[sample], leaf.dtype))


def test_a_side_without_differences_of_length_is_kept_as_the_other(tmp_path: Path) -> None:
    kept = keep(arrays((TOKENS, None), (np.ones((2, 4), np.int8), None)), tmp_path / "data")
    assert [kept.test_inputs[sample].tolist() for sample in range(2)] == [[1] * 4] * 2
    assert kept.train_inputs.dtype == kept.test_inputs.dtype == np.int64


def test_the_digest_changes_with_everything_that_it_covers(tmp_path: Path) -> None:
    """And that of the test samples with theirs alone."""
    base: dict[str, Any] = {"inputs": {"a": TOKENS, "b": NUMBERS}, "targets": CLASSES}

    def digests(side: str, changes: dict[str, Any], **about: Any) -> tuple[str, str]:
        parts = [(values["inputs"], values["targets"]) for values in (base | changes, base)]
        data = arrays(*(parts if side == "train" else parts[::-1]), **about)
        folder = tmp_path / f"{len([*tmp_path.iterdir()])}"
        kept = keep(data, folder)
        assert kept.digest == arrays_sha256(kept) == arrays_sha256(data)
        return kept.digest, read_description(folder).test_digest

    other_numbers = NUMBERS.copy()
    other_numbers[3, 1] += 1
    changes = [
        {"inputs": {"a": [*TOKENS[:2], [4, 5], [6], *TOKENS[4:]], "b": NUMBERS}},  # the same values, cut elsewhere
        {"inputs": {"a": TOKENS, "b": other_numbers}},
        {"targets": CLASSES[::-1]},
    ]
    first = digests("train", {})
    of_training = [digests("train", change) for change in changes]
    of_tests = [digests("test", change) for change in changes]
    names, weights = digests("train", {}, classes="xy"), digests("train", {}, sample_weights=np.arange(N))
    everything = [first, *of_training, *of_tests, names, weights]
    assert len({digest for digest, _ in everything}) == len(everything)
    assert {test for _, test in of_training} == {first[1]} == {weights[1]}
    assert len({test for _, test in (first, *of_tests, names)}) == len(of_tests) + 2


def test_the_digest_of_images_changes_with_a_pixel(tmp_path: Path) -> None:
    images = np.zeros((N, 4, 4), np.uint8)
    changed = images.copy()
    changed[3, 1, 2] = 1
    sets = [
        image_arrays(*each, CLASSES, classes="xy")
        for each in ((images, CLASSES, images), (changed, CLASSES, images), (images, CLASSES, changed))
    ]
    assert len({arrays_sha256(each) for each in sets}) == 3
    assert keep(sets[0], tmp_path / "data").digest == arrays_sha256(sets[0])


def test_pairs_of_sets_of_items_are_kept_as_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items are pairs, or dicts with labels as of Hugging Face's sets; the same arrays as arrays() makes."""
    monkeypatch.chdir(HELPERS)
    expected = tasks.reviews("")
    folder = fetch("leaf_tasks:reviews_as_sets", "", tmp_path / "data", progress="off")
    found = open_prepared(folder)
    assert isinstance(found, SampleArrays)
    assert found.digest == arrays_sha256(expected)
    assert (found.name, found.classes) == ("leaf_tasks:reviews_as_sets", ("0", "1", "2"))


class Named(list[Any]):
    """A set of items with attributes."""

    classes = ("low", "high")
    sample_weights = (1, 2, 3, 0, 0, 0)


def test_attributes_of_a_set_are_kept() -> None:
    items = Named(zip(NUMBERS, CLASSES, strict=True))
    found = make_arrays_from_user_result("own:data", (items, items[:2]), Progress("off"))
    assert found.classes == ("low", "high")
    assert found.sample_weights is not None
    assert found.sample_weights.tolist() == [1, 2, 3, 0, 0, 0]


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([((1, 2), 0), ([1, 2], 0)], "the inputs of .*item 1 are one array, .* item 0 are a tuple of 2"),
        ([({"a": 1}, 0), ({"b": 1}, 0)], "item 1 are a dict with b, .* item 0 are a dict with a"),
        ([(1.0, 0), (1.0, 0, 0)], r"training set: item 1 is a tuple: must be a pair \(inputs, targets\), or a"),
        ([{"a": 1}], "training set: item 0 is a dict: must be a pair .*, or a dict with labels"),
        ([(np.ma.masked_equal([0.0, 1.0], 1), 0)], r"train_inputs\[0\]: has masked values"),
        ([("a word", 0)], "train_inputs: must be numbers or truth values, got texts; .*OrdinalEncoder"),
    ],
)
def test_items_that_do_not_fit_are_refused(items: list[Any], words: str) -> None:
    with pytest.raises(UserError, match=f"dataset='own:data': .*{words}"):
        make_arrays_from_user_result("own:data", (items, [((1, 2), 0)]), Progress("off"))


def pair(inputs: Any, targets: Any = CLASSES) -> tuple[Any, Any]:
    return inputs, targets


MASKED = np.ma.masked_less(NUMBERS, 0)


@pytest.mark.parametrize(
    ("train", "test", "words"),
    [
        ({"a": NUMBERS, "b": NUMBERS[:5]}, NUMBERS, r"train_inputs\['b'\] has 5 samples, .* the same number"),
        (None, NUMBERS, "train_inputs: are None; give at least one array"),
        ({}, {}, "train_inputs: has no array; give at least one"),
        (["a"] * N, ["a"] * N, "train_inputs: .*got texts; .*OrdinalEncoder"),
        (NUMBERS.astype("M8[s]"), NUMBERS, r"got datetime64\[s\]; convert them to days .*astype\('datetime64\[D\]'\)"),
        ([NUMBERS[:2, :2], NUMBERS[:3]], NUMBERS, r"sample 1 has shape \[3, 3\] and sample 0 has \[2, 2\]; only the"),
        ({"unit price": NUMBERS}, NUMBERS, "the name 'unit price' must be a Python identifier"),
        ({"a": MASKED}, {"a": NUMBERS}, r"train_inputs\['a'\]: has masked values, .*; fill"),
        ([*map(np.array, TOKENS[:5]), np.ma.masked_equal([0, 1], 1)], TOKENS, r"train_inputs\[5\]: has masked values"),
        (
            {"a": NUMBERS},
            (NUMBERS, NUMBERS),
            "are a dict with a, and test_inputs a tuple of 2: .* the same form",
        ),
        (TOKENS, CLASSES, r"of train_inputs is int64 \[\?\], and of test_inputs int64 \[\]: .* the same type"),
        (NUMBERS, NUMBERS.astype(int), r"of train_inputs is float32 \[3\], and of test_inputs int64 \[3\]"),
    ],
)
def test_wrong_inputs_are_refused(train: Any, test: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        arrays(pair(train), pair(test))
    assert len(caught.value.message) < 250


@pytest.mark.parametrize(
    ("train", "test", "options", "words"),
    [
        (CLASSES, CLASSES[:5], {}, "test_targets has 5 samples, .*test_inputs has 6"),
        (CLASSES * 2, CLASSES, {"classes": "ab"}, r"train_targets: label 2 of sample 1 .* 2 classes: must be 0\.\.1"),
        (CLASSES, CLASSES - 1, {}, "whole numbers are classes .* at least 0, .* -1; .* floats"),
        (CLASSES * 10**9, CLASSES, {}, "whole numbers are classes .* below .* 1000000000; .* floats"),
        (CLASSES, CLASSES, {"sample_weights": [1, 2]}, r"one number for each of the 6 training samples, got \[2\]"),
    ],
)
def test_wrong_targets_are_refused(train: Any, test: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        arrays(pair(NUMBERS, train), pair(NUMBERS, test), **options)


HP = Hyperparameters(dataset="own:data", model="own:model", objective="regression")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "resnet18"}, "model='resnet18': needs images, .* has samples that are not images"),
        ({"image_size": 32}, "image_size=32: dataset='own:data' has samples that are not images; set image_size=0"),
        ({"augment": "crop"}, "augment='crop': .* are not images; set augment=none"),
        ({"num_classes": 5, "objective": "classification"}, "num_classes=5: the data set has 2 classes"),
        ({"validation_fraction": 0.99}, "validation_fraction=0.99: holds out all 6 training samples"),
    ],
)
def test_settings_that_do_not_fit_a_table_are_refused_before_ranks_start(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    keep(arrays(pair(NUMBERS), pair(NUMBERS), name="own:data"), tmp_path / "data")
    with pytest.raises(UserError, match=words):
        check_prepared_set(tmp_path / "data", replace(HP, **changes))


class Table(Frame):
    """With names of columns, as frames have."""

    columns = ("age", "income", "city")


MISSING = NUMBERS.copy()
MISSING[4, 1] = np.nan
MIXED = np.array([[1, True, 2.5]] * N, object)
WITH_NONE, WITH_TEXT, DATES = (np.array([[1, *row]] * N, object) for row in (
    (None, 2.5), (2, "Bern"), (None, date(2026, 1, 1)),
))  # fmt: skip
IDS = [f"customer {row}" for row in range(N)]


@pytest.mark.parametrize(
    ("train", "test", "words"),
    [
        (pair(Table(MISSING)), pair(NUMBERS), "^train_inputs: row 4: column 'income' is nan; replace"),
        (pair(NUMBERS), (MISSING, CLASSES, IDS), r"^test_inputs: row 4 \(id 'customer 4'\): column 1 is nan"),
        (pair({"a": [0.0, 1.0, np.inf] * 2}), pair({"a": [0.0] * N}), r"^train_inputs\['a'\]: row 2: inf"),
        (pair(Table(WITH_NONE)), pair(NUMBERS), "^train_inputs: row 0: column 'income' is nan"),
        (pair(Table(WITH_TEXT)), pair(NUMBERS), "^train_inputs: column 'city' has texts, .*OrdinalEncoder"),
        (pair(NUMBERS, np.array(list("ababab"), object)), pair(NUMBERS), "^train_targets: has texts, and must be numb"),
        (pair(Table(DATES)), pair(NUMBERS), "^train_inputs: column 'city' has dates, .*convert them to days"),
    ],
)
def test_what_is_no_number_is_named_by_row_and_column(train: Any, test: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        arrays(train, test)


def test_a_frame_of_numbers_of_several_types_is_a_table() -> None:
    kept = arrays(pair(Table(MIXED)), pair(sparse.csr_array(NUMBERS)))
    np.testing.assert_array_equal(kept.test_inputs, NUMBERS.astype(np.float32))
    np.testing.assert_array_equal(kept.train_inputs, np.array([[1, 1, 2.5]] * N, np.float32))


def test_a_dict_is_taken_by_name() -> None:
    kept = arrays(pair({"a": NUMBERS, "b": CLASSES}), pair({"b": CLASSES, "a": NUMBERS}))
    np.testing.assert_array_equal(kept.test_inputs["a"], NUMBERS.astype(np.float32))
    assert [*kept.test_inputs] == ["a", "b"]


def test_tensors_lose_gradients_and_bfloat16_becomes_float32(tmp_path: Path) -> None:
    """As leaves of arrays, as lists of tensors, and as items of a set."""
    values = torch.tensor([[1.5], [2.5], [3.0]], dtype=torch.bfloat16, requires_grad=True)
    for given in (values, list(values), values.detach().float().requires_grad_()):
        data = arrays((given, None), (given, None))
        np.testing.assert_array_equal(data.train_inputs, np.float32([[1.5], [2.5], [3.0]]))
    items = [(value, torch.tensor(0.5, dtype=torch.bfloat16)) for value in values]
    inputs, targets = collate_samples(items, ["a", "b", "c"], padded=False, masked=None)
    assert (inputs.tolist(), targets.tolist()) == ([[1.5], [2.5], [3.0]], [0.5] * 3)


def test_ids_and_preprocessing_are_kept(tmp_path: Path) -> None:
    kept = keep(arrays((NUMBERS, CLASSES, IDS), pair(NUMBERS), prepare=pair, preprocessing={"mean": 2}), tmp_path / "d")
    assert kept.train_ids is not None
    assert kept.train_ids.tolist() == IDS
    assert kept.test_ids is None
    assert pickle.loads(base64.b64decode(kept.preprocessing.pickle)) == {"mean": 2}
    assert kept.preprocessing.prepare == f"{__name__}:pair"
