"""Convert the columns of tables to numbers; name row and column of what is missing or no number."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.errors import UserError
from flyte_ddp.samples.leaves import form_of, name_leaves, require_numbers, restore_leaves

CATEGORIES = "make whole numbers of them by scikit-learn's OrdinalEncoder, or columns by its OneHotEncoder"
DAYS = "count days, by .astype('datetime64[D]').astype('int64')"
FIXES = {"U": CATEGORIES, "M": DAYS}  # of values that are no numbers, by the kind of NumPy's type
OTHERWISE = "give numbers for them, or a list of arrays of different lengths"


def convert_columns(name: str, given: Any, array: NDArray[Any]) -> NDArray[Any]:
    """Return ``array``, made of the user's ``given``, as numbers; UserError that names a column of texts or dates."""
    if array.ndim in (1, 2) and array.dtype.kind == "O":
        array = convert_objects(name, given, array)
    require_numbers(name, array, FIXES.get(array.dtype.kind, OTHERWISE))
    return array


def convert_objects(name: str, given: Any, array: NDArray[Any]) -> NDArray[Any]:
    columns = list[list[Any]]()
    for place, values in enumerate(array.T if array.ndim == 2 else [array]):
        columns.append([np.nan if value is None or type(value).__name__ == "NAType" else value for value in values])
        for kind, what in (("U", "texts"), ("M", "dates")):
            if any(isinstance(value, str) if kind == "U" else hasattr(value, "year") for value in columns[-1]):
                where = f"{name_column(given, place)} has" if array.ndim == 2 else "has"
                raise UserError(f"{name}: {where} {what}, and must be numbers; {FIXES[kind]}")
    try:
        return np.array(columns[0]) if array.ndim == 1 else np.array(columns, dtype=float).T
    except (TypeError, ValueError):  # such as for lists
        return array


def find_non_finite(values: NDArray[Any], ends: NDArray[np.int64] | None = None) -> tuple[int, list[int]] | None:
    """Return the first sample with NaN or infinity, and the indices of that number; None if all numbers are finite."""
    if values.dtype.kind != "f" or not values.size or np.isfinite([values.min(), values.max()]).all():
        return None
    at = [*map(int, np.unravel_index((~np.isfinite(values)).argmax(), values.shape))]
    return at[0] if ends is None else int(np.searchsorted(ends, at[0], side="right")), at


def find_bad_rows(values: NDArray[Any], given: Any, ends: NDArray[np.int64] | None = None) -> dict[int, str]:
    """Return by row why the row cannot be used: a number is NaN or infinite. ``ends`` are those of ragged samples."""
    if find_non_finite(values, ends) is None:
        return {}
    found = dict[int, str]()
    for at in np.argwhere(~np.isfinite(values)).tolist():
        row = at[0] if ends is None else int(np.searchsorted(ends, at[0], side="right"))
        column = f"{name_column(given, at[1])} is " if len(at) == 2 and ends is None else ""
        found.setdefault(row, f"{column}{values[*at]}")
    return found


def require_finite(
    name: str, values: NDArray[Any], given: Any, ids: NDArray[np.str_] | None, ends: NDArray[np.int64] | None = None
) -> None:
    """Raise UserError, with row and column, if a number is NaN or infinite; ``ends`` are those of ragged samples."""
    if (found := find_non_finite(values, ends)) is None:
        return
    row, at = found
    column = f", {name_column(given, at[1])}," if len(at) == 2 and ends is None else ""
    called = "" if ids is None else f" (id {str(ids[row])!r})"
    fix = "replace what is missing or infinite, as scikit-learn's SimpleImputer does, or leave the row out"
    raise UserError(f"{name}: row {row}{called}{column} is {values[*at]}: {fix}")


def list_columns(inputs: Any) -> dict[str, list[str]]:
    """Return the columns' names of each leaf that is a frame, such as one of pandas, by the leaf's name.

    Raises UserError for two columns of one name.
    """
    found = {key: [*map(str, each.columns)] for key, each in name_leaves(inputs).items() if hasattr(each, "columns")}
    for names in found.values():
        if twice := [name for place, name in enumerate(names) if name in names[:place]]:
            raise UserError(f"a frame has two columns {twice[0]!r}: each must have a name of its own; rename one")
    return found


def order_frames(name: str, inputs: Any, expected: Mapping[str, Sequence[str]]) -> Any:
    """Return inputs with the columns of each frame in the ``expected`` order, by the leaf's name.

    Raises:
        UserError: A frame has other columns.
    """

    def order(key: str, leaf: Any) -> Any:
        if not hasattr(leaf, "columns") or not expected.get(key):
            return leaf
        found, wanted = [*map(str, leaf.columns)], [*expected[key]]
        if sorted(found) != sorted(wanted):
            problem = f"the columns are {', '.join(found)}, and those of training {', '.join(wanted)}"
            raise UserError(f"{name}: {problem}; give the same")
        given = dict(zip(found, leaf.columns, strict=True))
        return leaf if found == wanted else leaf[[given[column] for column in wanted]]

    return restore_leaves(form_of(inputs), {key: order(key, leaf) for key, leaf in name_leaves(inputs).items()})


def name_column(given: Any, place: int) -> str:
    return f"column {str(given.columns[place])!r}" if hasattr(given, "columns") else f"column {place}"
