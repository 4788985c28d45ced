"""What arrays() makes of the containers of other libraries: taken without loss, or refused with what to give instead.

Libraries that are not installed are skipped.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch

from flyte_ddp import arrays
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.samples.leaves import Ragged
from flyte_ddp.datasets.collate import collate_samples
from flyte_ddp.datasets.columns import require_distinct
from flyte_ddp.datasets.leaf_conversion import convert_new_inputs_and_ids

N = 5
NUMBERS = np.random.default_rng(0).normal(size=(N, 2))
ROWS = NUMBERS.tolist()
COLUMNS = {"b": [0.5, 0.25, 2.0, 3.0, 4.0], "a": [*range(N)]}  # unequal types, and not in the order of the alphabet
TEXTS = {"name": ["x"] * N, "a": [1.5] * N}
DAYS = {"a": [1.5] * N, "day": np.arange(N).astype("M8[D]")}
LISTS = [[1, 2, 3], [], [4], [5, 6], [7]]
CLASSES = np.arange(N) % 2


def take(library: str) -> Any:
    return import_module(library)


def dataset(columns: dict[str, Any]) -> Any:
    return take("datasets").Dataset.from_dict(columns)


def tensor_dict(columns: dict[str, Any]) -> Any:
    return take("tensordict").TensorDict({name: torch.tensor(each) for name, each in columns.items()}, batch_size=[N])


# Makes a table or a leaf of a library, by its name.
TABLES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "pandas": pd.DataFrame,
    "polars": pl.DataFrame,
    "pyarrow": lambda columns: take("pyarrow").table(columns),
    "pyarrow batches": lambda columns: take("pyarrow").record_batch(columns),
    "datasets": dataset,
}
SERIES: dict[str, Callable[[list[Any]], Any]] = {
    "pandas": pd.Series,
    "polars": pl.Series,
    "pyarrow": lambda values: take("pyarrow").array(values),
    "pyarrow in chunks": lambda values: take("pyarrow").chunked_array([values[:2], values[2:]]),
    "datasets": lambda values: dataset({"a": values})["a"],
    "datasets of NumPy": lambda values: dataset({"a": values}).with_format("numpy")["a"],
    "awkward": lambda values: take("awkward").Array(values),
}


@pytest.mark.parametrize("library", TABLES)
def test_tables_are_taken_with_their_columns_by_name(library: str) -> None:
    make = TABLES[library]
    data = arrays((make(COLUMNS), CLASSES), (make({name: COLUMNS[name] for name in "ab"}), CLASSES))
    expected = np.array([COLUMNS["b"], COLUMNS["a"]], np.float32).T
    np.testing.assert_array_equal(data.train_inputs, expected)
    np.testing.assert_array_equal(data.test_inputs, expected)
    with pytest.raises(UserError, match=r"^test_inputs: the columns are c, .* training had b, a;"):
        arrays((make(COLUMNS), CLASSES), (make({"c": [1.0] * N}), CLASSES))


@pytest.mark.parametrize("library", TABLES)
@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"a": [1.0] * N, "b": [None, 1, 2, 3, 4]}, "row 0: column 'b' is nan; replace"),
        (TEXTS, "column 'name' has texts, and must be numbers; .*OrdinalEncoder"),
        (DAYS, "column 'day' has dates, and must be numbers; convert them to days"),
        ({"v": ROWS}, "column 'v' has lists, and must be numbers; .* a separate input"),
        (
            {"a": [1.5] * N, "v": ROWS},
            "column 'v' has lists, and must be numbers; .* a separate input",
        ),
    ],
)
def test_a_column_that_is_no_numbers_is_named(library: str, columns: dict[str, Any], words: str) -> None:
    table = TABLES[library](columns)
    with pytest.raises(UserError, match=f"^train_inputs: {words}"):
        arrays((table, CLASSES), (table, CLASSES))


@pytest.mark.parametrize("library", SERIES)
def test_columns_are_taken_whatever_their_lengths(library: str) -> None:
    make = SERIES[library]
    data = arrays(({"a": make(ROWS), "b": make(LISTS)}, make([0.5] * N)), ({"a": ROWS, "b": LISTS}, [0.5] * N))
    np.testing.assert_array_equal(data.train_inputs["a"], NUMBERS.astype(np.float32))
    assert [each.tolist() for each in data.train_inputs["b"][:]] == LISTS
    assert data.train_inputs["b"].dtype == np.int64
    assert data.train_targets.tolist() == [0.5] * N


def test_empty_samples_of_tables_have_their_columns() -> None:
    given = [[[1, 2]], [], [[3, 4], [5, 6]]]
    ragged = arrays((given, None), (given, None)).train_inputs
    assert [each.tolist() for each in ragged[:]] == given
    assert ragged.shape == (3, None, 2)


def test_a_tensordict_is_a_dict() -> None:
    given = tensor_dict({"a": ROWS, "b": COLUMNS["a"]})
    data = arrays((given, CLASSES), (given, CLASSES))
    assert data.train_inputs.keys() == {"a", "b"}
    np.testing.assert_array_equal(data.train_inputs["a"], NUMBERS.astype(np.float32))
    items = [(given[place], given[place]["b"]) for place in range(N)]
    inputs, targets = collate_samples(items, list("abcde"), padded=False, masked=None)
    assert (inputs["a"].tolist(), targets.tolist()) == (NUMBERS.astype(np.float32).tolist(), COLUMNS["a"])
    with pytest.raises(UserError, match=r"^train_inputs\['c'\]: is a TensorDict; .* one dict"):
        arrays(({"c": given}, CLASSES), ({"c": given}, CLASSES))


RAGGED = [torch.tensor(each, dtype=torch.int64) for each in LISTS]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_taken(layout: torch.layout) -> None:
    given = torch.nested.nested_tensor(RAGGED, layout=layout)
    data = arrays((given, CLASSES), (LISTS, CLASSES))
    assert isinstance(data.train_inputs, Ragged)
    assert [each.tolist() for each in data.train_inputs[:]] == LISTS


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize(
    "change", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, lambda values: values.to(torch.float8_e4m3fn)]
)
def test_sparse_and_small_tensors_are_taken(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    values = torch.tensor([[0, 1.5], [0.25, 0]])
    np.testing.assert_array_equal(arrays((change(values), None), (values, None)).train_inputs, values)


def test_floats_of_ml_dtypes_are_taken() -> None:
    values = np.array([[0, 1.5], [0.25, 0]])
    for name in ("bfloat16", "float8_e4m3fn"):
        given = values.astype(getattr(take("ml_dtypes"), name))
        np.testing.assert_array_equal(arrays((given, None), (values, None)).train_inputs, values)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (pl.LazyFrame(COLUMNS), r"^a LazyFrame has no rows yet; .* collect\(\)"),
        ((row for row in ROWS), "^train_inputs: must be an array, a table, a tensor, .*got generator"),
        (np.array([(1, 2.5)] * N, "i8,f8"), r"got \[\('f0'.*; .* dict, \{name: values\[name\]"),
        (NUMBERS + 1j, r"got complex128; .* \.real and \.imag"),
        (np.arange(N).astype("m8[s]"), r"got timedelta64\[s\]; convert them to seconds"),
        ({"a": {"b": NUMBERS}}, r"^train_inputs\['a'\]: is a dict; .* one dict"),
        ({"self": NUMBERS}, "^train_inputs: the name 'self' is reserved; rename it"),
        ({"x": NUMBERS, "outputs": NUMBERS}, "^train_inputs: the name 'outputs' is reserved; rename it"),
    ],
)
def test_what_cannot_be_taken_says_what_to_give(given: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        arrays((given, CLASSES), (given, CLASSES))
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("ids", [torch.arange(N), [*torch.arange(N)], pl.Series(range(N)), np.arange(N)])
def test_ids_of_tensors_are_their_numbers(ids: Any) -> None:
    kept = arrays((NUMBERS, None, ids), (NUMBERS, None)).train_ids
    assert kept is not None
    assert kept.tolist() == [*"01234"]


TIMES = 1.7e9 + np.arange(1000)  # float32 has steps of 128 there


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (TIMES, "has 1,000 different values, .* 9 .*float32; subtract"),
        (pd.DataFrame({"a": TIMES % 7, "time": TIMES + 0.5}), "column 'time' has 1,000 different values, .*float32"),
        (np.stack([TIMES % 7, 1e9 + np.arange(1000)], 1), "column 1 has 1,000 different values, .*float32"),
        (list(np.split(TIMES, [3, 500])), "has 1,000 different values, .*float32"),
        (np.arange(1e9, 1e9 + 1e6), "has 1,000,000 different values, .* 15,626 .*float32; "),
    ],
)
def test_values_that_float32_cannot_tell_apart_are_refused(given: Any, words: str) -> None:
    with pytest.raises(UserError, match=f"^train_inputs: {words}"):
        arrays((given, None), (given, None))
    with pytest.raises(UserError, match=r"^train_targets: "):
        arrays((np.zeros(len(given)), given), (np.zeros(len(given)), given))
    convert_new_inputs_and_ids("", given, None)  # new rows may lie closer together than those of the training


random = np.random.default_rng(1)


@pytest.mark.parametrize(
    "values",
    [
        random.normal(size=300_000),
        random.normal(1013, 0.3, size=300_000),  # air pressure
        random.lognormal(15, 3, size=300_000).round(),  # bytes
        np.array([0.3, 0.1 + 0.2, 0.1, 0.1 * 3 - 0.2]),  # with errors of rounding
        np.full(9, 1.7e9),
        1.7e9 + 60.0 * np.arange(0, 500_000, 10),  # a year
        np.array([np.nan, 1e9, 2e9]),
        np.float32(TIMES),
        TIMES.astype(np.int64),
    ],
)
def test_values_that_stay_apart_enough_are_kept(values: np.ndarray) -> None:
    require_distinct("values", None, values)
