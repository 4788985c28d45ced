"""Rows in the containers of users' libraries: chosen, ordered, described and identified alike."""

import datetime as dt
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

from flyte_ddp.core.errors import UserError
from flyte_ddp.datasets import rows

AGES, CITIES = [31.0, None, 44.0, 31.0], ["Bern", "Oslo", None, "Bern"]
DAYS = [dt.date(1970, 1, day) for day in (1, 2, 3, 1)]
TABLE = {"age": AGES, "city": CITIES, "day": DAYS}
CONTAINERS: dict[str, Any] = {
    "pandas": pd.DataFrame(TABLE),
    "pandas' dates": pd.DataFrame(TABLE).assign(day=pd.to_datetime(DAYS)),
    "polars": pl.DataFrame(TABLE),
    "dict": {name: np.array(values, dtype=object) for name, values in TABLE.items()},
    "list": [dict(zip(TABLE, values, strict=True)) for values in zip(*TABLE.values(), strict=True)],
    "structured": np.array([*zip(*TABLE.values(), strict=True)], dtype=[(name, object) for name in TABLE]),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_each_container_has_the_same_columns_and_digests(name: str) -> None:
    table = CONTAINERS[name]
    found = rows.normalize_columns(table)
    assert [*found] == [*TABLE]
    np.testing.assert_array_equal(found["age"], [31, np.nan, 44, 31])
    assert found["city"].tolist() == ["Bern", "Oslo", "", "Bern"]
    np.testing.assert_array_equal(found["day"], [0, 1, 2, 0])
    digests = rows.digest_rows(table)
    np.testing.assert_array_equal(digests, rows.digest_rows(CONTAINERS["dict"]))
    assert digests[0] == digests[3], "equal rows"
    assert len({*digests.tolist()}) == 3
    assert rows.count_rows(table) == 4
    chosen = rows.take_rows(table, np.array([2, 0]))
    np.testing.assert_array_equal(rows.digest_rows(chosen), digests[[2, 0]])
    ordered = rows.order_columns(table, ["city", "age"], "here")
    assert [*rows.get_columns_by_name(ordered)] == ["city", "age"]
    assert rows.normalize_columns(ordered)["city"].tolist() == found["city"].tolist()
    np.testing.assert_array_equal(rows.digest_rows(rows.order_columns(table, ["day", "city", "age"], "")), digests)
    with pytest.raises(UserError, match=r"here: the column town is missing; the rows have age, city, day"):
        rows.order_columns(table, ["age", "town"], "here")


def test_a_frame_gets_a_new_index() -> None:
    """So that what users join to it by the index joins row by row, as for a file that was just read."""
    taken = rows.take_rows(CONTAINERS["pandas"], np.array([3, 1]))
    assert taken.index.tolist() == [0, 1]


def test_arrays_and_texts_have_columns() -> None:
    numbers = np.array([[1, 2], [3, 4], [1, 2]])
    assert [*rows.normalize_columns(numbers)] == ["0", "1"]
    floats = rows.digest_rows(numbers.astype(np.float32))
    np.testing.assert_array_equal(rows.digest_rows(numbers), floats)
    assert floats[0] == floats[2] != floats[1]
    texts = ["a b", "c", "a b"]
    assert rows.normalize_columns(texts)[rows.SINGLE].tolist() == texts
    assert len({*rows.digest_rows(texts).tolist()}) == 2
    assert rows.order_columns(texts, [rows.SINGLE], "") is texts
    series = {"x": [np.arange(3), np.arange(5), np.arange(3)], "n": [1, 1, 1]}
    assert [*rows.normalize_columns(series)] == ["n"], "arrays of different lengths are no column of numbers"
    assert len({*rows.digest_rows(series).tolist()}) == 2


def test_values_of_one_meaning_are_one() -> None:
    """A whole number where a value is missing, truth values, -0, and another NaN."""
    frame = pd.DataFrame({"x": pd.array([1, None], dtype="Int64")})
    np.testing.assert_array_equal(rows.normalize_columns(frame)["x"], [1, np.nan])
    pairs = [([1, np.nan], [1.0, None]), ([True, False], [1, 0]), ([0.0], [-0.0]), ([np.nan], [-np.nan])]
    for one, other in pairs:
        digests = [rows.digest_rows({"x": values}).tolist() for values in (one, other)]
        assert digests[0] == digests[1], (one, other)
    assert rows.digest_rows({"x": [1.0]}) != rows.digest_rows({"y": [1.0]})
    assert rows.digest_rows({"x": [1.0], "y": [2.0]}) != rows.digest_rows({"x": [2.0], "y": [1.0]})


def test_two_columns_of_one_name_are_refused() -> None:
    frame = pd.DataFrame([[1, 2]], columns=["a", "a"])
    with pytest.raises(UserError, match="two columns are called a"):
        rows.get_columns_by_name(frame)
    for table in ({1: [1], "1": [2]}, [{1: 1, "1": 2}]):
        with pytest.raises(UserError, match="two columns are called 1"):
            rows.get_columns_by_name(table)


def test_names_that_are_no_texts_are_compared_as_texts() -> None:
    expected = rows.digest_rows({"1": [3.0, 4.0], "2": [5.0, 6.0]}).tolist()
    for table in ({2: [5.0, 6.0], 1: [3.0, 4.0]}, [{2: 5.0, 1: 3.0}, {2: 6.0, 1: 4.0}]):
        ordered = rows.order_columns(table, ["1", "2"], "here")
        assert [*rows.get_columns_by_name(ordered)] == ["1", "2"]
        assert rows.digest_rows(ordered).tolist() == expected
