"""Which files the user's own code consists of, found without importing any of it, and their digest."""

import ast
import hashlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from flyte_ddp.code_digest import ARITHMETIC, NO_PYTHON, code_in, parse
from flyte_ddp.user_code import not_found, search_working_directory, split

IDENTIFIED = {"flyte_ddp", *ARITHMETIC}  # by a digest and releases of their own
INSTALLED = {"site-packages", "dist-packages"}
STANDARD = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
IMPORTERS = ("import_module", "__import__")


def user_source_digest(spec: str) -> str:
    """Return a SHA-256 (hex) of the user's own code behind ``spec``, see :func:`user_sources`.

    Comments, docstrings, formatting and the place of the files do not count; what is no Python counts by its bytes.

    Raises:
        UserError: a malformed spec, or no such top-level module.
    """
    lines = (f"{name} {hashlib.sha256(code_in(content)).hexdigest()}" for name, _, content in user_sources(spec))
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def own_files(spec: str) -> set[Path]:
    """Return the files that :func:`user_sources` finds; none for what is no ``package.module:callable``."""
    return {path.resolve() for _, path, _ in user_sources(spec)} if ":" in spec else set()


def not_among(known: set[Path], spec: str, modules: Iterable[str]) -> list[str]:
    """Return files of the user's own that the loaded code of ``spec`` comes from, but for those that are known.

    Looks through the module of ``spec``, the ones named, and the modules of all that these have by name. Files count
    that are in the folder where the first one's top-level module is; they are given relative to it.

    Args:
        known: from :func:`own_files`, before the code was loaded, which may change where modules are looked for.
        modules: names in ``sys.modules``, such as of those that the model's layers are from.
    """
    if ":" not in spec:
        return []
    name = split(spec)[0]
    top = find_top_level(name.partition(".")[0])
    places = (top.submodule_search_locations or [top.origin or ""]) if top else []
    folders = {Path(place).resolve().parent for place in places}
    found: dict[Path, str] = {}
    waiting = [sys.modules.get(one) for one in (name, *modules)]
    while waiting:
        module = waiting.pop()
        file = getattr(module, "__file__", None)
        if module is None or not file or module.__name__.partition(".")[0] in IDENTIFIED or not is_own(file):
            continue
        path = Path(file).resolve()
        folder = next((folder for folder in folders if path.is_relative_to(folder)), None)
        if folder and path not in found:
            found[path] = path.relative_to(folder).as_posix()
            for value in vars(module).values():
                owner = str(getattr(value, "__module__", ""))
                waiting.append(value if isinstance(value, ModuleType) else sys.modules.get(owner))
    return sorted(relative for path, relative in found.items() if path not in known)


def user_sources(spec: str) -> Iterator[tuple[str, Path, bytes]]:
    """Yield names, paths and contents of the files that ``spec`` (``package.module:callable``) is made of.

    These are its top-level module, wherever that is, and all top-level modules of the user's own that these files
    import, and so on. The user's own are those that are neither Python's nor installed, nor this library or one of
    ARITHMETIC; a project that is installed to be edited stays its user's. Of a package it is every ``.py`` file,
    because packages also find modules of theirs in ways that are not to be seen in their source. Not seen are other
    files, such as data beside the code, and imports of other top-level modules by names that are computed.

    Puts the working directory first on ``sys.path``.

    Raises:
        UserError: a malformed spec, or no such top-level module.
    """
    top = split(spec)[0].partition(".")[0]
    search_working_directory()
    found = find_top_level(top)
    if found is None:
        raise not_found(spec, top)
    seen = {top, *IDENTIFIED}
    files = [*module_files(found)]
    while files:
        name, path = files.pop()
        try:
            content = path.read_bytes()
        except OSError:  # a link to nowhere, say: nothing that could be imported
            continue
        yield name, path, content
        for other in sorted(imported_modules(content) - seen):
            seen.add(other)
            if found := find_top_level(other):
                files += module_files(found, only_own=True)


def find_top_level(name: str) -> ModuleSpec | None:
    """Return where a top-level module is; None if there is none, or one without a place, such as ``__main__``."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def module_files(found: ModuleSpec, *, only_own: bool = False) -> Iterator[tuple[str, Path]]:
    """Yield names, relative to the folder that it is in, and paths of a top-level module's file or a package's files.

    Follows links to folders, each once. Leaves out hidden files and folders.
    """
    packages = found.submodule_search_locations
    for place in packages if packages is not None else filter(None, [found.origin if found.has_location else None]):
        if only_own and not is_own(place):
            continue
        if packages is None:
            yield Path(place).name, Path(place)
        entered: set[str] = set()  # links may lead round in circles
        for folder, folders, names in os.walk(place, followlinks=True):
            if (real := os.path.realpath(folder)) in entered:
                folders.clear()
                continue
            entered.add(real)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for path in (Path(folder, name) for name in names if name.endswith(".py") and not name.startswith(".")):
                yield f"{found.name}/{path.relative_to(place).as_posix()}", path


def is_own(place: str) -> bool:
    """Return whether a file or folder is the user's own: neither in Python's library nor among installed packages."""
    path = Path(place).resolve()
    return not INSTALLED.intersection(path.parts) and not any(path.is_relative_to(standard) for standard in STANDARD)


def imported_modules(source: bytes) -> set[str]:
    """Return the top-level modules that a source imports anywhere, by statements or by a literal given to IMPORTERS.

    Relative imports are left out, as they stay in the package. What is no Python imports none.
    """
    try:
        tree = parse(source)
    except NO_PYTHON:
        return set()
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.append(node.module or "")
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in IMPORTERS:
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            names += [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return {name.partition(".")[0] for name in names} - {""}
