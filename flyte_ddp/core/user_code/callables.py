"""Import user code that is named ``package.module:callable``."""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.user_code.modules import check_callable_is_allowed, check_module_is_allowed
from flyte_ddp.core.user_code.stored import find_sources, import_stored_module

NAME = r"[^\W\d]\w*"
SPEC = re.compile(rf"({NAME}(?:\.{NAME})*):({NAME})")


def load_callable(spec: str) -> Callable[..., Any]:
    """Import the callable that ``spec`` (``package.module:callable``) names, and return the callable.

    First puts the working directory on ``sys.path``. A StoredSpec is imported from the sources in a saved model.
    Exceptions of the import other than ImportError and SyntaxError pass through.

    Raises:
        UserError: The spec is malformed, the import raises ImportError or SyntaxError, or the callable does not exist
            or cannot be called. Also if FLYTE_DDP_MODULES does not allow the module, or the module that defines the
            callable.
    """
    module_name, attribute = split_spec(spec)
    add_working_directory_to_path()
    try:
        if (sources := find_sources(spec)) is not None:
            module = import_stored_module(sources, module_name)
        else:
            check_module_is_allowed(spec, module_name)
            module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise make_missing_module_error(spec, missing) from None
        fix = "install the missing module" if missing else "correct the module"
        raise UserError(f"{spec!r}: importing {module_name} failed: {error}; {fix}") from error
    try:
        found = getattr(module, attribute)
    except AttributeError:
        raise UserError(
            f"{spec!r}: module {module_name} ({getattr(module, '__file__', None)}) has no {attribute!r}; name a "
            "function or class that the module defines"
        ) from None
    if not callable(found):
        raise UserError(f"{spec!r}: is a {type(found).__name__}, not callable; name a function or class")
    if sources is None:
        check_callable_is_allowed(spec, module_name, found)
    return found  # type: ignore[no-any-return]


def check_options_are_accepted(
    what: str, function: Callable[..., Any], options: Mapping[str, Any], *positional: Any, **keywords: Any
) -> None:
    """Raise UserError if a callable does not accept the options as keyword arguments, beside the other arguments.

    Args:
        what: The name of the callable in the error.
        function: The callable.
        options: The options that the user gave.
        positional: The other positional arguments of the call.
        keywords: The other keyword arguments of the call.
    """
    try:
        inspect.signature(function).bind(*positional, **keywords, **options)
    except TypeError as error:
        raise UserError(f"options of {what}: {error}; correct the options, or the callable") from None


def check_positional_arguments(what: str, function: Callable[..., Any], *names: str) -> None:
    """Raise UserError if a callable does not accept as many positional arguments as there are names.

    A built-in callable without a signature is accepted.

    Args:
        what: The start of the error's text.
        function: The callable.
        names: The names are only counted, and shown in the error as the expected parameters.
    """
    try:
        inspect.signature(function).bind(*names)
    except ValueError:
        pass  # a built-in callable without a signature
    except TypeError as error:
        raise UserError(f"{what}: {error}; the callable must accept ({', '.join(names)})") from None


def split_spec(spec: str) -> tuple[str, str]:
    match = SPEC.fullmatch(spec)
    if match is None:
        raise UserError(f"{spec!r}: must have the form package.module:callable, such as my_data.flowers:load")
    return match[1], match[2]


def add_working_directory_to_path() -> None:
    """Put the working directory first on ``sys.path``, as ``python -m`` does, and clear Python's import caches.

    If the directory is on ``sys.path`` already, the order is not changed.
    """
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()


def make_missing_module_error(spec: str, module: str) -> UserError:
    fix = f"install the module, or start from the directory that contains it (now {Path.cwd()})"
    return UserError(f"{spec!r}: no module named {module!r}; {fix}")
