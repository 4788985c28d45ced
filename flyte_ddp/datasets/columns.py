"""Convert the columns of tables to numbers, and report missing or non-numeric values with row and column."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.samples.leaves import (
    get_leaves_form,
    name_leaves,
    prepare_tensors_for_numpy,
    require_numbers,
    restore_leaves,
)

CATEGORIES = "encode them with scikit-learn's OrdinalEncoder (whole numbers) or OneHotEncoder (columns)"
DAYS = "convert them to days with .astype('datetime64[D]').astype('int64')"
SECONDS = "convert them to seconds with .astype('timedelta64[s]').astype('int64')"
LISTS = "pass them as a separate input: inputs may be a dict of arrays"
FIELDS = "pass its fields as a dict, {name: values[name] for name in ...}"
# Advice for values that are no numbers, by the kind of their NumPy type.
FIXES = {"U": CATEGORIES, "M": DAYS, "m": SECONDS, "V": FIELDS, "c": "pass .real and .imag as two inputs"}
OTHERWISE = "convert them to numbers, or pass a list of arrays of different lengths"
STEPS = 1000  # float32 steps in the range of a column of fractions that suffice to learn from
NOISE = 1e-12  # relative to a column's largest value: a smaller range comes from rounding


def convert_columns(name: str, given: Any, array: NDArray[Any]) -> NDArray[Any]:
    """Return ``array`` as numbers, with NaN for None and NA. An array of numbers or truth values is returned unchanged.

    Args:
        name: The name of the leaf, with which errors begin.
        given: The leaf as the user gave it. Errors name its columns.
        array: The values of ``given`` as an array.

    Raises:
        UserError: ``given`` is no array, or the array has texts, dates, lists or other values that are no numbers.
    """
    if not array.ndim and array.dtype.kind == "O":
        rule = "must be an array, a table, a tensor, or a list of numbers or of arrays"
        raise UserError(f"{name}: {rule}, got {type(given).__name__}")
    if array.ndim in (1, 2) and array.dtype.kind == "O":
        array = convert_objects(name, given, array)
    require_numbers(name, array, FIXES.get(array.dtype.kind, OTHERWISE))
    return array


def convert_objects(name: str, given: Any, array: NDArray[Any]) -> NDArray[Any]:
    """Return an array of objects, [n] or [n, columns], as numbers. None and NA become NaN.

    If NumPy cannot convert the values, the result still holds objects, and the caller must reject the array. ``given``,
    the leaf as the user gave it, only names columns in errors.

    Raises:
        UserError: A value is a text or a date, or a column of a table has lists.
    """
    columns = list[list[Any]]()
    for place, values in enumerate(array.T if array.ndim == 2 else [array]):
        columns.append([np.nan if value is None or type(value).__name__ == "NAType" else value for value in values])
        for kind, what in (("U", "texts"), ("M", "dates")):
            if any(isinstance(value, str) if kind == "U" else hasattr(value, "year") for value in columns[-1]):
                where = f"{name_column(given, place)} has" if array.ndim == 2 else "has"
                raise UserError(f"{name}: {where} {what}, and must be numbers; {FIXES[kind]}")
        if array.ndim == 2 and any(isinstance(value, (list, tuple, np.ndarray)) for value in columns[-1]):
            raise UserError(f"{name}: {name_column(given, place)} has lists, and must be numbers; {LISTS}")
    try:
        return np.array(columns[0]) if array.ndim == 1 else np.array(columns, dtype=float).T
    except (TypeError, ValueError):  # for example, lists
        return array


def unpack_values(name: str, values: Any) -> Any:
    """Convert a user's leaf to an array, a dense tensor or a list that NumPy reads correctly.

    Sparse matrices become dense arrays. polars frames, pyarrow tables and Hugging Face data sets become arrays [n,
    columns]. A column of a Hugging Face data set becomes a list. Tensors lose their gradients, and small floats become
    float32. Arrays and pandas frames are returned unchanged.

    Raises:
        UserError: The leaf is a dict or a lazy frame, or a column of a polars frame or similar table is not numeric.
    """
    if isinstance(values, Mapping):
        raise UserError(f"{name}: is a {type(values).__name__}; pass all arrays in one dict without nested dicts")
    if hasattr(values, "toarray"):  # sparse matrices of SciPy and scikit-learn
        return values.toarray()
    # NumPy reads dates in a polars frame as floats, and dates in a pandas frame as dates.
    if column_names(values) is not None and not hasattr(type(values), "iloc") and hasattr(type(values), "__getitem__"):
        return stack_columns(name, values)
    if isinstance(values, Sequence) and not isinstance(values, (list, tuple, str, bytes)):
        return values[:]  # a column of a Hugging Face dataset, which NumPy would read item by item
    return prepare_tensors_for_numpy(values)


def stack_columns(name: str, table: Any) -> NDArray[Any]:
    """Return a polars frame, a pyarrow table or a Hugging Face dataset as an array [n, columns].

    Raises:
        UserError: A column has texts, dates or another type that is not numeric. Columns of objects are accepted.
    """
    if hasattr(table, "with_format"):  # a Hugging Face dataset
        table = table.with_format("arrow")[:]
    found = {column: np.asarray(table[column]) for column in column_names(table) or ()}
    for column, values in found.items():
        if values.dtype.kind not in "biufO":  # convert_objects() checks objects value by value
            what = {"U": "texts", "M": "dates"}.get(values.dtype.kind, str(values.dtype))
            fix = FIXES.get(values.dtype.kind, OTHERWISE)
            raise UserError(f"{name}: column {column!r} has {what}, and must be numbers; {fix}")
    return np.column_stack([*found.values()]) if found else np.empty((len(table), 0))


def require_distinct(name: str, given: Any, values: NDArray[Any]) -> None:
    """Raise a UserError if float32 keeps at most half of a column's different float64 values.

    Times and ids are typical examples. Whole numbers are checked from 2**24 on. Fractions are checked if float32 has
    fewer than ``STEPS`` steps in their range, because some of many measured numbers are always equal in float32. Arrays
    of other types than float64 are accepted.

    Args:
        name: The name of the leaf, with which the error begins.
        given: The leaf as the user gave it. The error names its column.
        values: The values of the leaf. The last dimension is that of the columns.
    """
    if values.dtype.kind != "f" or values.dtype.itemsize < 8 or not values.size:
        return
    table = values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values[:, np.newaxis]
    with np.errstate(invalid="ignore"):  # inf - inf
        highest, lowest = np.fmax.reduce(table), np.fmin.reduce(table)
        largest, spread = np.fmax(abs(highest), abs(lowest)), highest - lowest
        step = np.spacing(largest.astype(np.float32))
        coarse = step * STEPS > spread
        suspicious = (spread > largest * NOISE) & (coarse | (step > 1))
    for place in np.flatnonzero(suspicious).tolist():
        known = np.unique(table[:, place])
        kept = np.unique(known.astype(np.float32))
        if len(kept) * 2 <= len(known) and (coarse[place] or (known == np.rint(known)).all()):
            column = f"{name_column(given, place)} has" if values.ndim == 2 else "has"
            found = f"{len(known):,} different values, but only {len(kept):,} after conversion to float32"
            fix = "subtract the smallest value first, remove them, or pass whole numbers as int64 in a separate leaf"
            raise UserError(f"{name}: {column} {found}; {fix}")


def find_non_finite(values: NDArray[Any], ends: NDArray[np.int64] | None = None) -> tuple[int, list[int]] | None:
    """Find the first NaN or infinite number, and return its sample's position and its full index in ``values``.

    If all numbers are finite, returns None. If the samples are ragged, ``values`` has the concatenated samples, and
    ``ends`` has the end of each sample in ``values``.
    """
    if values.dtype.kind != "f" or not values.size or np.isfinite([values.min(), values.max()]).all():
        return None
    at = [*map(int, np.unravel_index((~np.isfinite(values)).argmax(), values.shape))]
    return at[0] if ends is None else int(np.searchsorted(ends, at[0], side="right")), at


def find_bad_rows(values: NDArray[Any], given: Any, ends: NDArray[np.int64] | None = None) -> dict[int, str]:
    """Return a text for each row with a NaN or infinite number, such as "column 'age' is nan", by position.

    Only the first such number of a row is named. The column is missing in the text unless the values are a table.

    Args:
        values: The values of a leaf.
        given: The leaf as the user gave it, with the names of the columns.
        ends: The end of each sample in ``values`` if the samples are ragged.
    """
    if find_non_finite(values, ends) is None:
        return {}
    found = dict[int, str]()
    for at in np.argwhere(~np.isfinite(values)).tolist():
        row = at[0] if ends is None else int(np.searchsorted(ends, at[0], side="right"))
        found.setdefault(row, describe_number(values, at, given, ends))
    return found


def describe_number(values: NDArray[Any], at: list[int], given: Any, ends: NDArray[np.int64] | None) -> str:
    column = f"{name_column(given, at[1])} is " if len(at) == 2 and ends is None else ""
    return f"{column}{values[*at]}"


def require_finite(
    name: str, values: NDArray[Any], given: Any, ids: NDArray[np.str_] | None, ends: NDArray[np.int64] | None = None
) -> None:
    """Raise a UserError with row, id and column if a number is NaN or infinite.

    Args:
        name: The name of the leaf, with which the error begins.
        values: The values of the leaf.
        given: The leaf as the user gave it, with the names of the columns.
        ids: The id of each sample, for the error.
        ends: The end of each sample in ``values`` if the samples are ragged.
    """
    if (found := find_non_finite(values, ends)) is not None:
        row, at = found
        raise bad_row_error(name, row, describe_number(values, at, given, ends), ids)


def bad_row_error(name: str, row: int, reason: str, ids: NDArray[np.str_] | None) -> UserError:
    called = "" if ids is None else f" (id {str(ids[row])!r})"
    fix = "replace missing or infinite values, for example with scikit-learn's SimpleImputer, or remove the row"
    return UserError(f"{name}: row {row}{called}: {reason}; {fix}")


def list_columns(inputs: Any) -> dict[str, list[str]]:
    """Return the column names of each frame among the leaves, by the leaf's name. Other leaves are skipped.

    Raises:
        UserError: A frame has two columns of the same name, or is lazy.
    """
    columns = {key: column_names(each) for key, each in name_leaves(inputs).items()}
    found = {key: [*map(str, names)] for key, names in columns.items() if names is not None}
    for names in found.values():
        if twice := [name for place, name in enumerate(names) if name in names[:place]]:
            raise UserError(f"a frame has two columns {twice[0]!r}: column names must be unique; rename one")
    return found


def order_frames(name: str, inputs: Any, expected: Mapping[str, Sequence[str]]) -> Any:
    """Return the inputs with the columns of each frame in the order that ``expected`` lists for the leaf's name.

    Leaves without column names, and leaves that ``expected`` lacks, are returned unchanged. ``name`` begins the text of
    errors.

    Raises:
        UserError: A frame has other columns than expected, or is lazy.
    """

    def order(key: str, leaf: Any) -> Any:
        """Return the leaf of the name ``key`` with its columns in the expected order."""
        columns = column_names(leaf)
        if columns is None or not expected.get(key):
            return leaf
        found, wanted = [*map(str, columns)], [*expected[key]]
        if sorted(found) != sorted(wanted):
            problem = f"the columns are {', '.join(found)}, but training had {', '.join(wanted)}"
            raise UserError(f"{name}: {problem}; pass the same columns")
        given = dict(zip(found, columns, strict=True))
        return leaf if found == wanted else select_columns(leaf, [given[column] for column in wanted])

    return restore_leaves(get_leaves_form(inputs), {key: order(key, leaf) for key, leaf in name_leaves(inputs).items()})


def column_names(frame: Any) -> Sequence[Any] | None:
    """Return the column names of a pandas or polars frame, a pyarrow table or a Hugging Face dataset. Else return None.

    Raises:
        UserError: The frame is lazy and has not been computed.
    """
    kind = type(frame)
    if hasattr(kind, "columns") and hasattr(kind, "collect"):
        raise UserError(f"a {kind.__name__} has no rows yet; pass the result of its collect()")
    # The type is examined because a pandas frame also has its columns as attributes.
    return frame.column_names if hasattr(kind, "column_names") else getattr(frame, "columns", None)


def select_columns(frame: Any, names: Sequence[Any]) -> Any:
    if hasattr(type(frame), "column_names"):
        return (frame.select_columns if hasattr(frame, "select_columns") else frame.select)([*names])
    return frame[[*names]]


def name_column(given: Any, place: int) -> str:
    names = column_names(given)
    return f"column {place}" if names is None else f"column {str(names[place])!r}"
