"""Makes inputs of new rows by a model's fitted object and the user's code. Needs no torch."""

import base64
import hashlib
import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.models.sidecar import FittedObject, LeavesInput, Sidecar
from flyte_ddp.core.samples.leaves import (
    Leaves,
    Ragged,
    count_samples,
    get_leaves_form,
    map_leaves,
    name_leaves,
    restore_leaves,
)
from flyte_ddp.core.user_code.callables import load_callable
from flyte_ddp.core.user_code.source import translate_user_errors
from flyte_ddp.core.user_code.stored import find_sources, import_stored_module
from flyte_ddp.datasets import columns
from flyte_ddp.datasets.leaf_conversion import convert_inputs_and_ids, convert_new_inputs_and_ids, convert_ragged
from flyte_ddp.datasets.rows import order_columns, take_rows
from flyte_ddp.datasets.sample_arrays import SampleArrays
from flyte_ddp.datasets.table import Table, make_table, prepare_copy, read_rows
from flyte_ddp.models.preprocessing import require_two_arguments
from flyte_ddp.models.stored_code import read_model_json


class StoredUnpickler(pickle.Unpickler):
    """Loads classes from the stored sources of ``spec``, and classes of other modules by import."""

    def __init__(self, spec: str, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self.sources = find_sources(spec) or {}

    def find_class(self, module: str, name: str) -> Any:
        """Return a class for the unpickler. Modules stored in ``model.json`` take precedence over installed modules."""
        path = module.replace(".", "/")
        if {f"{path}.py", f"{path}/__init__.py"} & self.sources.keys():
            module = import_stored_module(self.sources, module).__name__
        return super().find_class(module, name)


class NewRows(NamedTuple):
    """The usable rows of a new source."""

    inputs: Leaves  # [n, ...] of the usable rows, with the types that the model accepts
    places: NDArray[np.int64]  # [n], ascending, among all N rows
    bad: dict[int, str]  # why the other rows cannot be used, by their places
    ids: NDArray[np.str_] | None  # [N]
    rows: Any  # the usable rows as they were read; None if the user's ``prepare`` function reads them
    targets: Any  # of the usable rows; None if the source has no targets


@dataclass(frozen=True)
class Preprocessing:
    """A model's fitted object, with the user's code that makes inputs of rows."""

    fitted: Any
    packed: FittedObject  # as in model.json
    types: Mapping[str, str]  # of the model's inputs, by the leaf's name

    @property
    def error_prefix(self) -> str:
        """The beginning of error messages: which hyperparameter names the user's code."""
        table, prepare = self.packed.table, self.packed.prepare
        return f"dataset={table!r}: prepare" if table else f"prepare={prepare!r}"

    @cached_property
    def user_code(self) -> Any:
        """The user's Table, or the function prepare(preprocessing, source). Imported at the first use."""
        if spec := self.packed.table:
            return make_table(load_callable(spec), f"dataset={spec!r}")
        prepare = load_callable(self.packed.prepare)
        require_two_arguments(prepare, self.packed.prepare)
        return prepare

    def prepare(self, rows: Any) -> Leaves:
        """Return the model's inputs for rows: NumPy arrays of the types that the model accepts.

        Calls the user's code with a copy of the fitted object.

        Args:
            rows: A frame, an array, a dict of columns or a list, as returned by ``read`` of the user's Table. Columns
                are found by name, in any order. Further columns are ignored.

        Raises:
            UserError: A column is missing, an input is NaN or infinite, or the data set is not a Table. The user's code
                raises.
        """
        inputs, _ = convert_inputs_and_ids(f"{self.error_prefix}: ", self._call_prepare(rows), None)
        return cast_leaves_if_exact(inputs, self.types)

    def read(self, source: Any) -> NewRows:
        """Read the rows of a new source, and make the model's inputs of them, by the user's code.

        ``source`` is a path, or another object that the user's code accepts. Rows with NaN or infinite inputs are
        listed in ``bad`` of the result, and have no inputs.

        Raises:
            UserError: The user's code raises, or returns inputs or ids of another form.
        """
        rows = targets = None
        if isinstance(self.user_code, Table):
            where = f"dataset={self.packed.table!r}: read({str(source)!r})"
            with translate_user_errors(where):
                rows, targets, given_ids = read_rows(self.user_code, source, where)
            given = self._call_prepare(rows)
        else:
            with translate_user_errors(self.error_prefix):
                returned = self.user_code(self.fitted, source)
            if not isinstance(returned, (tuple, list)) or len(returned) != 2:
                what = f"returned {type(returned).__name__}; must return (inputs, ids), where ids may be None"
                raise UserError(f"{self.error_prefix}: {what}")
            given, given_ids = returned
            given = columns.order_frames(f"{self.error_prefix}: inputs", given, self.packed.columns)
        inputs, ids = convert_new_inputs_and_ids(f"{self.error_prefix}: ", given, given_ids)
        bad, named = dict[int, str](), name_leaves(given)
        for key, leaf in name_leaves(inputs).items():
            parts = (leaf.values, None, leaf.ends) if isinstance(leaf, Ragged) else (leaf, named[key])
            bad = {**columns.find_bad_rows(*parts), **bad}
        places = np.setdiff1d(np.arange(count_samples(inputs)), [*bad])
        if bad:
            inputs = map_leaves(lambda leaf: take_leaf_rows(leaf, places), inputs)
            rows, targets = (None if each is None else take_rows(each, places) for each in (rows, targets))
        return NewRows(cast_leaves_if_exact(inputs, self.types), places, bad, ids, rows, targets)

    def _call_prepare(self, rows: Any) -> Any:
        """Call ``prepare`` of the user's Table with rows, and return the inputs.

        Columns of rows and inputs are in the order of the training.

        Raises:
            UserError: The data set is not a Table, or the user's code raises.
        """
        if not isinstance(self.user_code, Table):
            problem = "the function reads a file and accepts no rows; derive the data set from flyte_ddp.Table"
            raise UserError(f"{self.error_prefix}: {problem}")
        ordered = order_columns(rows, self.packed.rows, self.error_prefix)
        with translate_user_errors(self.error_prefix):
            given = prepare_copy(self.user_code, self.fitted, ordered)
        return columns.order_frames(f"{self.error_prefix}: inputs", given, self.packed.columns)


def load_preprocessing(model_json: Path | str | Sidecar) -> Preprocessing:
    """Return a model's preprocessing: the fitted object, with the user's code that makes inputs of rows.

    Unpickles the object, and imports the user's code at the first use, so trust ``model.json`` as you trust code. Needs
    no torch, unless the module of the user's Table imports torch.

    Args:
        model_json: The path of the file, or the sidecar that ``load_model`` or ``load_champion`` has returned.

    Raises:
        UserError: The file cannot be read or is damaged, the model has no preprocessing, or the object cannot be
            unpickled here.
    """
    sidecar = model_json if isinstance(model_json, Sidecar) else read_model_json(Path(model_json))
    packed = sidecar.preprocessing
    if not packed.pickle:
        fix = "derive the data set from flyte_ddp.Table and train again, or predict a dataset"
        raise UserError(f"the model has no preprocessing; {fix}")
    try:
        content = base64.b64decode(packed.pickle)
    except ValueError:
        content = b""
    if hashlib.sha256(content).hexdigest() != packed.sha256:
        raise UserError("the preprocessing in model.json is damaged; copy the file from the run again")
    try:
        fitted = StoredUnpickler(packed.table or packed.prepare, content).load()
    except Exception as error:  # user-defined objects may raise anything
        raise UserError(
            f"the preprocessing in model.json cannot be read here ({type(error).__name__}: {error}); it was saved with "
            f"{packed.releases}, and needs the modules that define its objects"
        ) from error
    leaves = sidecar.input.leaves if isinstance(sidecar.input, LeavesInput) else {}
    return Preprocessing(fitted, packed, {name: leaf.dtype for name, leaf in leaves.items()})


def read_new_rows(sidecar: Sidecar, source: Any) -> tuple[Leaves, NDArray[np.str_] | None]:
    """Read new rows, and return the model's inputs [N, ...] and the rows' ids (None without ids).

    Unpickles the model's preprocessing and calls the user's code, so trust ``model.json`` as you trust code. ``source``
    is a path, or another object that the user's code reads.

    Raises:
        UserError: The model has no preprocessing, or the object cannot be unpickled here. The user's code raises. A row
            has NaN or infinite inputs, or :func:`flyte_ddp.arrays` would reject the inputs.
    """
    preprocessing = load_preprocessing(sidecar)
    new = preprocessing.read(source)
    for row, reason in new.bad.items():
        raise columns.bad_row_error(f"{preprocessing.error_prefix}: inputs", row, reason, new.ids)
    return new.inputs, new.ids


def prepare_test_inputs(sidecar: Sidecar, data: SampleArrays) -> SampleArrays:
    """Return ``data`` with test inputs that the model's preprocessing makes.

    Returns ``data`` unchanged if its preprocessing equals the model's, and nothing can be made anew. Nothing can be
    made anew if ``data`` has no rows, the model has no table, or the model does not store the table's code. Otherwise
    runs the user's code. The training inputs of the result are the test inputs, too.

    Raises:
        UserError: The preprocessing differs, and ``data`` has no rows or the model has no table. Also if the user's
            code raises.
    """
    mine, theirs = sidecar.preprocessing, data.preprocessing
    by_table = bool(mine.table and data.rows)
    same = (mine.sha256, mine.table) == (theirs.sha256, theirs.table)
    if same and not (by_table and find_sources(mine.table)):
        return data
    if not by_table:
        problem = f"its inputs were made with {theirs.describe()}, but the model was trained with {mine.describe()}"
        fix = "derive the data set from flyte_ddp.Table, which prepares inputs for each model, and train again"
        raise UserError(f"dataset={data.name!r}: {problem}; {fix}")
    inputs = load_preprocessing(sidecar).prepare(data.load_rows("test"))
    return replace(data, train_inputs=inputs, test_inputs=inputs, preprocessing=mine)


def cast_leaves_if_exact(inputs: Leaves, types: Mapping[str, str]) -> Leaves:
    """Return leaves in ``types``, which has types by name. A leaf is not converted if a value would change."""
    named = {name: cast_leaf_if_exact(leaf, types.get(name, "")) for name, leaf in name_leaves(inputs).items()}
    return restore_leaves(get_leaves_form(inputs), named)


def cast_leaf_if_exact(leaf: Any, dtype: str) -> Any:
    """Return an array of inputs, converted to the model's ``dtype`` ("float", "int64" or "bool").

    Integers and booleans become float32 for "float". If a value would change to int64 or bool, or for any other
    ``dtype``, the array is returned unchanged.
    """
    values = leaf.values if isinstance(leaf, Ragged) else leaf
    kind, new = values.dtype.kind, values
    if dtype == "float" and kind in "biu":
        new = values.astype(np.float32)
    elif dtype == "int64" and (kind == "b" or (kind == "f" and (values == np.trunc(values)).all())):
        new = values.astype(np.int64)
    elif dtype == "bool" and kind in "fiu" and np.isin(values, (0, 1)).all():
        new = values.astype(bool)
    return Ragged(new, leaf.ends) if isinstance(leaf, Ragged) else new


def take_leaf_rows(leaf: Any, places: NDArray[np.int64]) -> Any:
    """Return the samples of an array, or of a ragged array, at ``places``."""
    if not isinstance(leaf, Ragged):
        return leaf[places]
    return convert_ragged("inputs", [leaf[place] for place in places.tolist()])
