"""Functions of rows in the containers of users' libraries: choose rows, name columns, identify rows by content.

Rows are a pandas or polars frame, a pyarrow table, a NumPy array, a dict of columns, or a list.
"""

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.text.formatting import join_first
from flyte_ddp.datasets.columns import column_names, select_columns

SINGLE = "row"  # name of the column of rows that have no columns, such as a list of texts
MISSING = ""  # the value of a text column in rows without a value
SECONDS_OF_DAY = 86_400
NUMBERS = (bool, int, float, np.number, np.bool_)
MIXED = np.uint64(0x9E3779B97F4A7C15)  # Steele et al., "Fast splittable pseudorandom number generators", 2014


def count_rows(rows: Any) -> int:
    return len(next(iter(rows.values()), ())) if isinstance(rows, Mapping) else len(rows)


def take_rows(rows: Any, places: NDArray[np.int64]) -> Any:
    """Return the rows at ``places``, in the container type of ``rows``. A pandas frame gets a new index."""
    if isinstance(rows, Mapping):
        return {name: take_rows(values, places) for name, values in rows.items()}
    if hasattr(rows, "iloc"):
        return rows.iloc[places].reset_index(drop=True)
    if isinstance(rows, (list, tuple)):
        return [rows[place] for place in places.tolist()]
    return rows.take(places) if hasattr(rows, "column_names") else rows[places]


def get_columns_by_name(rows: Any) -> dict[str, Any]:
    """Return a dict of the columns of rows. Values are not converted.

    The columns of an array [n, k] are called "0", "1" and so on. A list of dicts has the columns of its first dict,
    with None for missing values. Rows without columns, for example texts, become one column called "row".

    Raises:
        UserError: Two columns have the same name.
    """
    names = find_column_names(rows)
    if names is None:
        if getattr(rows, "ndim", 1) == 2:
            return {str(place): column for place, column in enumerate(np.asarray(rows).T)}
        return {SINGLE: rows}
    texts = [*map(str, names)]
    if twice := sorted({text for text in texts if texts.count(text) > 1}):
        raise UserError(f"rows: two columns are called {join_first(twice)}; rename one of them")
    if isinstance(rows, list):
        return {text: [row.get(name) for row in rows] for text, name in zip(texts, names, strict=True)}
    return {text: rows[name] for text, name in zip(texts, names, strict=True)}


def find_column_names(rows: Any) -> list[Any] | None:
    """Return the column names of rows as the container holds the names, or None if the rows have no column names."""
    if isinstance(rows, list):
        return [*rows[0]] if rows and isinstance(rows[0], Mapping) else None
    if isinstance(rows, Mapping):
        return [*rows]
    names = column_names(rows)
    if names is None:
        names = getattr(getattr(rows, "dtype", None), "names", None)  # of a structured array
    return None if names is None else [*names]


def order_columns(rows: Any, names: Sequence[str], where: str) -> Any:
    """Return rows with only the columns ``names``, in this order. Other columns are dropped.

    Raises:
        UserError: A column is missing, or an array without column names has more columns. The text begins with
            ``where``.
    """
    found = [*get_columns_by_name(rows)]
    if found == [*names]:
        return rows
    if missing := [name for name in names if name not in found]:
        had = f"the rows have {join_first(found, 20)}"
        raise UserError(
            f"{where}: the column {join_first(missing)} is missing; {had}; pass the same columns as in training"
        )
    stored = find_column_names(rows)
    if stored is None:
        raise UserError(
            f"{where}: the rows have {len(found)} columns, but training had {len(names)}; pass the same columns"
        )
    given = {str(name): name for name in stored}
    if isinstance(rows, list):
        return [{name: row.get(given[name]) for name in names} for row in rows]
    if isinstance(rows, Mapping):
        return {name: rows[given[name]] for name in names}
    return select_columns(rows, [given[name] for name in names])


def normalize_columns(rows: Any) -> dict[str, NDArray[Any]]:
    """Return each column of n rows as float64 [n] or as texts [n], by the column's name.

    Truth values become 0 and 1, dates become days since 1970, and durations become days. Missing numbers are NaN, and
    missing texts are "". Columns of arrays are skipped.
    """
    found = {name: normalize_values(values) for name, values in get_columns_by_name(rows).items()}
    return {name: values for name, values in found.items() if values.ndim == 1}


def normalize_values(values: Any) -> NDArray[Any]:
    """Return a column of n values as float64 [n] or texts [n]. Dates become days since 1970.

    If the values are lists or arrays, the result has more than one dimension.
    """
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        return np.empty((len(values), 0))
    if array.dtype.kind in "biuf":
        return array.astype(np.float64)
    if array.dtype.kind in "mM":
        seconds = array.astype(f"{array.dtype.kind}8[s]").astype(np.int64)
        return np.where(np.isnat(array), np.nan, seconds / SECONDS_OF_DAY)
    return array if array.ndim != 1 else normalize_objects(array)


def normalize_objects(array: NDArray[Any]) -> NDArray[Any]:
    """Return values [n] of any types as float64 if all known values are numbers or dates, else as texts.

    Missing values become NaN or "". Dates become days since 1970.
    """
    missing = np.array([is_missing(value) for value in array], dtype=bool)
    known = array[~missing].tolist()
    if known and all(isinstance(value, NUMBERS) for value in known):
        numbers = np.full(len(array), np.nan)
        numbers[~missing] = known
        return numbers
    if known and all(hasattr(value, "toordinal") for value in known):
        dates = np.full(len(array), np.datetime64("NaT", "s"))
        dates[~missing] = [np.datetime64(str(value)[:19]) for value in known]
        return normalize_values(dates)
    return np.array([MISSING if bad else str(value) for bad, value in zip(missing, array, strict=True)], dtype=np.str_)


def is_missing(value: Any) -> bool:
    nan = isinstance(value, (float, np.floating)) and np.isnan(value)
    return value is None or type(value).__name__ in ("NAType", "NaTType") or bool(nan)


def digest_rows(rows: Any) -> NDArray[np.uint64]:
    """Return a hash of each row [n]. Rows with equal values in columns of equal names have equal hashes.

    The order of the columns makes no difference. Values are compared in the form of :func:`normalize_columns`, in
    which, for example, True equals 1.
    """
    columns = normalize_columns(rows)
    total = np.zeros(count_rows(rows), np.uint64)
    for name, values in columns.items():
        total += mix(digest_column(values) ^ digest_text(name))
    for name in get_columns_by_name(rows).keys() - columns.keys():  # columns of arrays
        contents = [digest_bytes(pickle.dumps(np.asarray(value))) for value in get_columns_by_name(rows)[name]]
        total += mix(np.array(contents, np.uint64) ^ digest_text(name))
    return total


def digest_column(values: NDArray[Any]) -> NDArray[np.uint64]:
    """Return a hash of each value of a column of float64 or texts. All NaNs are equal, and 0 equals -0."""
    if values.dtype.kind == "f":
        plain = np.where(np.isnan(values), np.nan, values + 0.0)  # the same bits for all NaNs, and for 0 and -0
        return mix(plain.view(np.uint64))
    texts, places = np.unique(values, return_inverse=True)
    return np.array([digest_text(text) for text in texts.tolist()], np.uint64)[places]


def digest_texts(texts: Sequence[str]) -> NDArray[np.uint64]:
    return np.array([digest_text(text) for text in texts], np.uint64)


def digest_text(text: str) -> np.uint64:
    return np.uint64(digest_bytes(text.encode("utf-8", "surrogateescape")))


def digest_bytes(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return splitmix64's hash of each number."""
    mixed = numbers + MIXED
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
