"""Importing the user's own code, named ``package.module:callable``."""

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flyte_ddp.errors import UserError

NAME = r"[^\W\d]\w*"
SPEC = re.compile(rf"({NAME}(?:\.{NAME})*):({NAME})")


def load_callable(spec: str) -> Callable[..., Any]:
    """Import and return what ``spec`` names; modules in the working directory are found as with ``python -m``.

    Args:
        spec: ``package.module:callable``.

    Raises:
        UserError: a malformed spec, or no such module, attribute or callable. What the module itself raises while it
            is imported comes through unchanged, unless it is an import that fails, or no Python.
    """
    module_name, attribute = split(spec)
    search_working_directory()
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise not_found(spec, missing) from None
        fix = "install what it needs" if missing else "correct it"
        raise UserError(f"{spec!r}: importing {module_name} failed: {error}; {fix}") from error
    try:
        found = getattr(module, attribute)
    except AttributeError:
        raise UserError(
            f"{spec!r}: module {module_name} ({getattr(module, '__file__', None)}) has no {attribute!r}; "
            "name a function or class that it defines"
        ) from None
    if not callable(found):
        raise UserError(f"{spec!r}: is a {type(found).__name__}, not callable; name a function or class")
    return found  # type: ignore[no-any-return]


def split(spec: str) -> tuple[str, str]:
    """Return the module's and the attribute's name; UserError for a malformed spec."""
    match = SPEC.fullmatch(spec)
    if match is None:
        raise UserError(f"{spec!r}: must have the form package.module:callable, such as my_data.flowers:load")
    return match[1], match[2]


def search_working_directory() -> None:
    """Put the working directory first on ``sys.path``, as ``python -m`` does and console scripts don't."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()


def modules_hiding_pythons() -> dict[str, Path]:
    """Return the modules in the working directory that have the name of one of Python's own, by that name.

    A rank's interpreter looks there first, and so may import them instead of Python's.
    """
    here = [*Path.cwd().glob("*.py"), *(path.parent for path in Path.cwd().glob("*/__init__.py"))]
    return {path.stem: path for path in here if path.stem in sys.stdlib_module_names}


def not_found(spec: str, module: str) -> UserError:
    """Return the error for a module that Python does not find."""
    fix = f"install it, or start from the directory that holds it (now {Path.cwd()})"
    return UserError(f"{spec!r}: no module named {module!r}; {fix}")
