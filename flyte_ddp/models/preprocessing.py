"""Pack objects that were fitted to a data set, for ``dataset.json`` and ``model.json``."""

import base64
import hashlib
import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.models.sidecar import FittedObject
from flyte_ddp.core.user_code.callables import split_spec
from flyte_ddp.core.user_code.digest import format_package_versions


def pack_preprocessing(
    preprocessing: Any, prepare: Callable[[Any, Any], Any] | None, columns: Mapping[str, Sequence[str]]
) -> FittedObject:
    """Return ``preprocessing`` (pickled), ``prepare`` and ``columns``. If the first two are None, nothing was fitted.

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
            return FittedObject()
        raise UserError("preprocessing: also pass prepare=, a function that uses it to make the inputs of new rows")
    spec = f"{prepare.__module__}:{getattr(prepare, '__qualname__', '')}"
    try:
        split_spec(spec)
    except UserError:
        raise UserError(f"prepare={spec!r}: must be a function defined in a module") from None
    require_two_arguments(prepare, spec)
    return pickle_fitted_object(preprocessing, prepare=spec, columns=columns)


def require_two_arguments(prepare: Callable[..., Any], spec: str) -> None:
    """Raise UserError if ``prepare``, named ``spec``, does not accept two arguments or has no signature."""
    try:
        inspect.signature(prepare).bind(None, "")
    except (TypeError, ValueError):  # ValueError: a builtin without a signature
        raise UserError(f"prepare={spec!r}: must accept (preprocessing, source)") from None


def pickle_fitted_object(fitted: Any, **fields: Any) -> FittedObject:
    """Return an object as a FittedObject. ``fields`` are the fields about the user code and the columns.

    Raises:
        UserError: The object cannot be pickled.
    """
    try:
        content = pickle.dumps(fitted)
    except Exception as error:  # user-defined objects may raise anything
        fix = "replace lambdas and nested functions with functions defined in a module"
        raise UserError(f"preprocessing: cannot be pickled ({error}); {fix}") from error
    sha256 = hashlib.sha256(content).hexdigest()
    packed = base64.b64encode(content).decode()
    return FittedObject(releases=format_package_versions(), sha256=sha256, pickle=packed, **fields)
