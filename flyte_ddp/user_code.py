"""Code of the user's own, named ``package.module:callable``: importing it, and a digest of its source."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flyte_ddp.errors import UserError

NAME = r"[^\W\d]\w*"
SPEC = re.compile(rf"({NAME}(?:\.{NAME})*):({NAME})")


def load_callable(spec: str) -> Callable[..., Any]:
    """Imports what ``spec`` names; modules in the working directory are found as with ``python -m``.

    Args:
        spec: ``package.module:callable``.

    Raises:
        UserError: a malformed spec, or no such module, attribute or callable. What the module itself raises while it
            is imported comes through unchanged, unless it is an import that fails.

    """
    module_name, attribute = split(spec)
    search_working_directory()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise not_found(spec, error.name) from None
        raise UserError(f"{spec!r}: importing {module_name} failed: {error}; install what it needs") from error
    except ImportError as error:
        raise UserError(f"{spec!r}: importing {module_name} failed: {error}") from error
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


def user_source_digest(spec: str) -> str:
    """SHA-256 (hex) of the source behind ``spec``, without importing any of it.

    The source is every ``.py`` file of the module's top-level package, or the one file of a top-level module. Changes
    in other packages that it imports are not seen.

    Raises:
        UserError: a malformed spec, or no such top-level module.

    """
    top = split(spec)[0].partition(".")[0]
    search_working_directory()
    digest = hashlib.sha256()
    for name, path in source_files(spec, top):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def mentions(spec: str, word: str) -> bool:
    """Whether the source behind ``spec``, as for :func:`user_source_digest`, has the word in it.

    Raises:
        UserError: a malformed spec, or no such top-level module.

    """
    top = split(spec)[0].partition(".")[0]
    search_working_directory()
    return any(word.encode() in path.read_bytes() for _, path in source_files(spec, top))


def split(spec: str) -> tuple[str, str]:
    """The module's and the attribute's name."""
    match = SPEC.fullmatch(spec)
    if match is None:
        raise UserError(f"{spec!r}: must have the form package.module:callable, such as my_data.flowers:load")
    return match[1], match[2]


def search_working_directory() -> None:
    """Puts the working directory first on ``sys.path``, as ``python -m`` does and console scripts don't."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()


def source_files(spec: str, top: str) -> Iterator[tuple[str, Path]]:
    """Name and path of each source file of the top-level module, in a fixed order that its location does not change."""
    try:
        found = importlib.util.find_spec(top)
    except ValueError:  # a module without a spec, such as __main__
        found = None
    if found is None:
        raise not_found(spec, top)
    if found.submodule_search_locations is None:
        if found.has_location and found.origin:
            yield top, Path(found.origin)
        return
    for location in found.submodule_search_locations:
        folder = Path(location)
        paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
        yield from sorted((name, path) for name, path in paths.items() if not hidden(name))


def hidden(name: str) -> bool:
    """Whether a relative path leads through a folder such as ``.venv``."""
    return name.startswith(".") or "/." in name


def not_found(spec: str, module: str) -> UserError:
    """The error for a module that Python does not find."""
    return UserError(
        f"{spec!r}: no module named {module!r}; install it, or start from the directory that holds it "
        f"(now {Path.cwd()})"
    )
