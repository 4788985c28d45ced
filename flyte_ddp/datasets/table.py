"""Data sets of rows. The user's class reads rows, fits to the training rows, and prepares inputs from any rows."""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.samples.leaves import name_leaves
from flyte_ddp.core.text.formatting import join_first
from flyte_ddp.datasets import columns, rows
from flyte_ddp.datasets.leaf_conversion import convert_id
from flyte_ddp.datasets.sample_arrays import SampleArrays, make_arrays
from flyte_ddp.models.preprocessing import pickle_fitted_object

TRIED, ALONE = 16, 3  # numbers of test rows that are prepared again as a group, and one by one
PARAMETERS = {
    "read": ("source",),
    "fit": ("rows", "targets"),
    "prepare": ("fitted", "rows"),
    "is_test": ("rows", "ids"),
}
UNKNOWN = -1  # the class number of a new row whose target is missing


class Table:
    """Base class of data sets of rows, for the hyperparameter ``dataset`` (``package.module:Class``).

    Define ``read``. If something is fitted, also define ``fit`` and ``prepare``. The library calls ``prepare`` for the
    rows of training, tests, judgements, predictions and windows, always with the object that ``fit`` returned for the
    model. ``fit`` gets the training rows only. The fitted object is pickled into ``model.json``.
    """

    classes: ClassVar[Sequence[str]] = ()  # names of the classes (default: the targets' values, sorted)
    test: ClassVar[float] = 0.1  # share of the rows that is held out for the test

    def read(self, source: str) -> Any:
        """Return (rows, targets, ids) of a file of training rows or of new rows.

        Rows are a frame, an array, a dict of columns or a list. Targets are None if a file has none. Texts, truth
        values and whole numbers are classes, and floats are numbers to predict. Ids may be None.
        """
        raise NotImplementedError("define read(self, source)")

    def fit(self, rows: Any, targets: Any) -> Any:  # noqa: ARG002
        """Return an object that is fitted to the training rows, for example a scikit-learn transformer.

        Targets are class numbers [n], or the numbers to predict.
        """
        return None

    def prepare(self, fitted: Any, rows: Any) -> Any:  # noqa: ARG002
        """Return the model's inputs for rows. The inputs of a row must not depend on other rows."""
        return rows

    def is_test(self, rows: Any, ids: Any) -> Any:
        """Return which rows are for the test, as truth values [n].

        By default a hash of the id decides. If the rows have no ids, a hash of the row's content decides.
        """
        return hash_samples(rows, ids) < np.uint64(self.test * 2**64)


def hash_samples(found: Any, ids: Any) -> NDArray[np.uint64]:
    """Return a hash of each row's id. If ``ids`` is None, hash the content of the rows ``found``."""
    return rows.digest_rows(found) if ids is None else rows.digest_texts([*map(convert_id, ids)])


def split_by_id(ids: Any, test: float = 0.1) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide samples by a hash of their ids.

    A sample keeps its side when samples are added, removed or reordered.

    Args:
        ids: An id for each of N samples.
        test: The expected share of test samples. The actual share varies by chance.

    Returns:
        The positions of the training samples and of the test samples, ascending.

    Raises:
        UserError: ``test`` is not between 0 and 1.
    """
    if not 0 < test < 1:
        raise UserError(f"test={test}: must be a fraction between 0 and 1")
    held_out = hash_samples(None, ids) < np.uint64(test * 2**64)
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def load_table(spec: str, found: type[Table], source: str) -> SampleArrays:
    """Read, divide, fit and prepare the rows of a user's Table, and return the data set.

    The data set keeps the rows and the fitted object. ``fit`` and ``prepare`` get deep copies. ``prepare`` is called on
    new instances, and is called again on parts of the test rows, to find inputs that depend on other rows. Exceptions
    of the user's code pass through.

    Args:
        spec: The name of the class, ``package.module:Class``.
        found: The class.
        source: The argument of ``read``.

    Raises:
        UserError: The table, or a value that its methods return, is unfit. Also if an input depends on other rows.
    """
    table, where = make_table(found, f"dataset={spec!r}"), f"dataset={spec!r}"
    if found.is_test is Table.is_test and not 0 < table.test < 1:
        raise UserError(f"{where}: test={table.test}: must be a fraction between 0 and 1")
    read, targets, ids = read_rows(table, source, where)
    if targets is None:
        raise UserError(f"{where}: read() returned no targets; training needs them")
    samples = rows.count_rows(read)
    targets, classes = convert_targets(targets, [*map(str, table.classes)], where)
    held_out = np.asarray(table.is_test(read, ids))
    if held_out.dtype != bool or held_out.shape != (samples,):
        rule = f"must return a bool for each of the {samples} rows"
        raise UserError(f"{where}: is_test() returned {held_out.dtype} {list(held_out.shape)}; {rule}")
    sides = {"train": np.flatnonzero(~held_out), "test": np.flatnonzero(held_out)}
    for side, places in sides.items():
        if not len(places):
            raise UserError(
                f"{where}: none of the {samples} rows is in the {side} split; change test={table.test} or is_test"
            )
    chosen = {side: rows.take_rows(read, places) for side, places in sides.items()}
    goals = {side: rows.take_rows(targets, places) for side, places in sides.items()}
    fitted = table.fit(*copy.deepcopy((chosen["train"], goals["train"])))
    if fitted is None and found.fit is not Table.fit:
        rule = "only this object is saved with the model and passed to prepare()"
        raise UserError(f"{where}: fit() returned None; return the fitted object, because {rule}")
    listed, numbered = [*rows.get_columns_by_name(read)], are_places(table.classes)
    packed = pickle_fitted_object(fitted, table=spec, rows=listed, numbered=numbered)
    inputs = {side: prepare_copy(table, fitted, part) for side, part in chosen.items()}
    require_independent_rows(table, fitted, chosen["test"], inputs["test"], where)
    names = None if ids is None else np.array([*map(convert_id, ids)])
    parts = ((inputs[side], goals[side], None if names is None else names[sides[side]]) for side in sides)
    packed = replace(packed, columns=columns.list_columns(inputs["train"]))
    try:
        return make_arrays(*parts, classes=classes, name=spec, packed=packed, rows=chosen)
    except UserError as error:
        raise UserError(f"{where}: {error.message}") from error


def prepare_copy(table: Table, fitted: Any, found: Any) -> Any:
    """Return the inputs of the rows ``found``, prepared by a new instance of the table from deep copies.

    The new instance ensures that ``prepare`` depends only on the fitted object and the rows, and changes neither.
    """
    return type(table)().prepare(copy.deepcopy(fitted), copy.deepcopy(found))


def make_table(found: Callable[[], Any], where: str) -> Table:
    """Return a new instance of the class ``found``. Exceptions of the class pass through.

    Raises:
        UserError: The class is no Table, or a method has other parameters. The text begins with ``where``.
    """
    table = found()
    if not isinstance(table, Table):
        raise UserError(f"{where}: is not a flyte_ddp.Table; derive the class from flyte_ddp.Table")
    for name, parameters in PARAMETERS.items():
        try:
            inspect.signature(getattr(table, name)).bind(*parameters)
        except TypeError:
            raise UserError(f"{where}: {name} must accept (self, {', '.join(parameters)})") from None
    return table


def read_rows(table: Table, source: str, where: str) -> tuple[Any, Any, Any]:
    """Return rows, targets and ids of a source. Targets and ids are None if the source has none.

    Exceptions of the user's ``read`` pass through.

    Raises:
        UserError: ``read`` returned another type, no row, or parts of unequal lengths. The text begins with ``where``.
    """
    returned = table.read(source)
    if not isinstance(returned, (tuple, list)) or len(returned) not in (2, 3):
        rule = "must return (rows, targets, ids), where targets and ids may be None"
        raise UserError(f"{where}: read() returned {type(returned).__name__}; it {rule}")
    found, targets, ids = (*returned, None)[:3]
    if not hasattr(found, "__len__") or hasattr(found, "toarray"):
        rule = "rows must be a frame, an array, a dict of columns or a list (make sparse matrices in prepare)"
        raise UserError(f"{where}: read() returned {type(found).__name__} as rows; {rule}")
    samples = rows.count_rows(found)
    if not samples:
        raise UserError(f"{where}: read() found no row in {source!r}")
    for name, values in (("targets", targets), ("ids", ids)):
        if values is not None and rows.count_rows(values) != samples:
            raise UserError(f"{where}: read() returned {samples} rows but {rows.count_rows(values)} {name}")
    return found, targets, ids


def convert_targets(targets: Any, declared: Sequence[str], where: str) -> tuple[Any, Sequence[str]]:
    """Return targets with class numbers in place of classes, and the names of the classes.

    Targets that are numbers to predict are returned unchanged, with ``declared``. If no names are declared, the classes
    are the values of the targets, sorted.

    Args:
        targets: The targets that ``read`` returned.
        declared: The names in ``Table.classes``, or empty.
        where: The start of errors.

    Raises:
        UserError: A target is missing, or is none of the declared classes.
    """
    values = np.asarray(targets)
    if isinstance(targets, dict) or values.ndim != 1 or values.dtype.kind == "f":
        return targets, declared
    names = name_targets(values, declared, where)
    if missing := np.flatnonzero(names == rows.MISSING).tolist():
        raise UserError(f"{where}: row {missing[0]} has no target; remove rows without a target in read()")
    numbers = values.dtype.kind in "iu"
    known = [*declared] or sorted({*names.tolist()}, key=int if numbers else str)
    if unknown := sorted({*names.tolist()}.difference(known)):
        raise UserError(
            f"{where}: the target {unknown[0]!r} is not in classes = {join_first(known)}; correct the target or classes"
        )
    return number_names(names, known), known


def name_targets(values: NDArray[Any], declared: Sequence[str], where: str) -> NDArray[np.str_]:
    """Return the name of each target's class, or "" if the target is missing, [n].

    If ``declared`` has a name that is not a number, numbers are positions in ``declared``. All other targets become
    texts, whether or not ``declared`` has the text.

    Args:
        values: The targets, texts or numbers, [n].
        declared: The names of the classes, or empty.
        where: The start of the error.

    Raises:
        UserError: A number is not a position in ``declared``.
    """
    names = []
    for value in values.tolist():
        if rows.is_missing(value) or value == rows.MISSING:
            names.append(rows.MISSING)
        elif are_places(declared) and isinstance(value, (int, float)) and not isinstance(value, bool):
            if value not in range(len(declared)):
                raise UserError(f"{where}: the target {value} is not a position in classes = {join_first(declared)}")
            names.append(declared[int(value)])
        else:
            names.append(convert_id(value))
    return np.array(names, dtype=np.str_)


def are_places(declared: Sequence[Any]) -> bool:
    """Return whether whole-number targets are positions in ``declared``, the names of the classes.

    If no names are declared, or if all names are numbers, return False.
    """
    return bool(declared) and not all(str(name).isdecimal() for name in declared)


def number_names(names: NDArray[np.str_], classes: Sequence[str]) -> NDArray[np.int64]:
    """Return the position of each name in ``classes``, and -1 for the name "". Other names raise KeyError."""
    places = {name: place for place, name in enumerate(classes)} | {rows.MISSING: UNKNOWN}
    return np.array([places[name] for name in names.tolist()], np.int64)


def require_independent_rows(table: Table, fitted: Any, some: Any, inputs: Any, where: str) -> None:
    """Raise UserError if inputs of rows change when these rows are prepared without the other rows.

    Up to 16 rows are prepared again as a group, and 3 of these alone. Small differences of rounding are accepted.

    Args:
        table: The user's table.
        fitted: The object that ``fit`` returned.
        some: The rows.
        inputs: The inputs that ``prepare`` returned for all these rows.
        where: The start of the error.
    """
    samples = rows.count_rows(some)
    if samples < 2:
        return
    few = np.unique(np.linspace(1, samples - 1, TRIED).astype(np.int64))[::-1]  # in another order, too
    for group in (few, *few[:ALONE, np.newaxis]):
        alone = name_leaves(prepare_copy(table, fitted, rows.take_rows(some, group)))
        for name, leaf in name_leaves(inputs).items():
            for place, row in enumerate(group.tolist()):
                whole, other = to_array(leaf, group[place : place + 1]), to_array(alone[name], np.array([place]))
                same = whole.shape == other.shape
                if same and whole.dtype.kind in "biuf":
                    same = np.allclose(whole, other, rtol=1e-4, atol=1e-6, equal_nan=True)
                if not same:
                    rule = "it must use only the fitted object and the row itself, and must fit nothing"
                    raise UserError(
                        f"{where}: prepare() returns different inputs for test row {row} if other rows differ; {rule}"
                    )


def to_array(leaf: Any, places: NDArray[np.int64]) -> NDArray[Any]:
    taken = rows.take_rows(leaf, places)
    return np.asarray(taken.toarray() if hasattr(taken, "toarray") else taken)
