"""Pack objects that were fitted to a data set as texts for ``dataset.json`` and ``model.json``."""

import base64
import hashlib
import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flyte_ddp.core.checks.parsing import JsonObject
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.user_code.callables import split_spec
from flyte_ddp.core.user_code.digest import list_releases

PREPROCESSING = "preprocessing"  # key in dataset.json and in model.json
NUMBERED = "numbered"  # key in a preprocessing, true if whole numbers as targets are positions in ``Table.classes``
TABLE = "table"  # key in a preprocessing: the Table that makes inputs of rows, as package.module:Class


def pack_preprocessing(
    preprocessing: Any, prepare: Callable[[Any, Any], Any] | None, columns: Mapping[str, Sequence[str]]
) -> JsonObject:
    """Return a JSON object with the pickled ``preprocessing``, the name of ``prepare``, and ``columns``.

    If ``preprocessing`` and ``prepare`` are None, the object is empty.

    Args:
        preprocessing: Any object that can be pickled.
        prepare: A function, defined in a module, of ``preprocessing`` and a source of new rows.
        columns: The column names of each frame, by the name of the leaf.

    Raises:
        UserError: ``preprocessing`` cannot be pickled, or is given without ``prepare``. Also if ``prepare`` is not
            defined in a module or does not accept two arguments.
    """
    if prepare is None:
        if preprocessing is None:
            return {}
        raise UserError("preprocessing: also pass prepare=, a function that uses it to make the inputs of new rows")
    spec = f"{prepare.__module__}:{getattr(prepare, '__qualname__', '')}"
    try:
        split_spec(spec)
    except UserError:
        raise UserError(f"prepare={spec!r}: must be a function defined in a module") from None
    require_two_arguments(prepare, spec)
    return {"prepare": spec, **pickle_for_json(preprocessing), "columns": columns}


def require_two_arguments(prepare: Callable[..., Any], spec: str) -> None:
    """Raise UserError if ``prepare``, named ``spec``, does not accept two arguments or has no signature."""
    try:
        inspect.signature(prepare).bind(None, "")
    except (TypeError, ValueError):  # ValueError: a builtin without a signature
        raise UserError(f"prepare={spec!r}: must accept (preprocessing, source)") from None


def pickle_for_json(fitted: Any) -> JsonObject:
    """Return a JSON object with an object's pickle in base64, its SHA-256, and the versions of installed packages.

    Raises:
        UserError: The object cannot be pickled.
    """
    try:
        content = pickle.dumps(fitted)
    except Exception as error:  # user-defined objects may raise anything
        fix = "replace lambdas and nested functions with functions defined in a module"
        raise UserError(f"preprocessing: cannot be pickled ({error}); {fix}") from error
    sha256 = hashlib.sha256(content).hexdigest()
    return {"releases": list_releases(), "sha256": sha256, "pickle": base64.b64encode(content).decode()}
