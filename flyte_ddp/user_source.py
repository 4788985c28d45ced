"""Which files the user's own code consists of, found without importing any of it, and their digest."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import sys
import sysconfig
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType

from flyte_ddp.code_digest import ARITHMETIC
from flyte_ddp.user_code import not_found, search_working_directory, split

IDENTIFIED = {"flyte_ddp", *ARITHMETIC}  # by a digest and releases of their own
INSTALLED = {"site-packages", "dist-packages"}
STANDARD = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
PARSING = threading.Lock()  # for what warnings do meanwhile, which is the same for all threads
PARSED_AGAIN = 10  # times


def user_source_digest(spec: str) -> str:
    """SHA-256 (hex) of the user's own code behind ``spec``, see :func:`user_sources`. Its place does not change it.

    Raises:
        UserError: a malformed spec, or no such top-level module.
    """
    lines = (f"{name} {hashlib.sha256(content).hexdigest()}" for name, _, content in user_sources(spec))
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def own_files(spec: str) -> set[Path]:
    """The files that :func:`user_sources` finds; none for what is no ``package.module:callable``."""
    return {path.resolve() for _, path, _ in user_sources(spec)} if ":" in spec else set()


def not_among(known: set[Path], spec: str, modules: Iterable[str]) -> list[str]:
    """Files of the user's own that the loaded code of ``spec`` comes from, but for those that are known.

    Looked through are the module of ``spec``, the ones named, and what these have by name, as far as it is in the
    folder where the first one's top-level module is, relative to which the files are given.

    Args:
        known: from :func:`own_files`, before the code was loaded, which may change where modules are looked for.
        modules: names in ``sys.modules``, such as of those that the model's layers are from.
    """
    if ":" not in spec:
        return []
    name = split(spec)[0]
    top = located(name.partition(".")[0])
    places = (top.submodule_search_locations or [top.origin or ""]) if top else []
    folders = {Path(place).resolve().parent for place in places}
    found: dict[Path, str] = {}
    waiting = [sys.modules.get(one) for one in (name, *modules)]
    while waiting:
        module = waiting.pop()
        place = getattr(module, "__file__", None)
        if module is None or not place or module.__name__.partition(".")[0] in IDENTIFIED or not is_own(place):
            continue
        path = Path(place).resolve()
        relative = [path.relative_to(folder).as_posix() for folder in folders if path.is_relative_to(folder)]
        if relative and path not in found:
            found[path] = relative[0]
            waiting += [module_of(value) for value in vars(module).values()]
    return sorted(relative for path, relative in found.items() if path not in known)


def module_of(value: object) -> ModuleType | None:
    """The module that something is, or is from: of a class or function its own, else that of its class."""
    if isinstance(value, ModuleType):
        return value
    owner = value if isinstance(value, (type, FunctionType)) else type(value)
    return sys.modules.get(str(owner.__module__))


def user_sources(spec: str) -> Iterator[tuple[str, Path, bytes]]:
    """Names, paths and contents of the files that ``spec`` (``package.module:callable``) is made of.

    These are its top-level module, wherever that is, and all top-level modules of the user's own that these files
    import, and so on. The user's own are those that are neither Python's nor installed, nor this library, torch and
    torchvision; a project that is installed to be edited stays its user's. Of a package it is every ``.py`` file,
    because packages also find modules of theirs in ways that are not to be seen in their source. Not seen are other
    files, such as data beside the code, and imports of other top-level modules by names that are computed.

    Raises:
        UserError: a malformed spec, or no such top-level module.
    """
    top = split(spec)[0].partition(".")[0]
    search_working_directory()
    found = located(top)
    if found is None:
        raise not_found(spec, top)
    seen = {top, *IDENTIFIED}
    files = [*files_of(found)]
    while files:
        name, path = files.pop()
        try:
            content = path.read_bytes()
        except OSError:  # a link to nowhere, say: nothing that could be imported
            continue
        yield name, path, content
        for other in sorted(imported(content) - seen):
            seen.add(other)
            found = located(other)
            files += files_of(found, only_own=True) if found else []


def located(top: str) -> ModuleSpec | None:
    """Where a top-level module is; None if there is none, or one without a place, such as ``__main__``."""
    try:
        return importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None


def files_of(found: ModuleSpec, *, only_own: bool = False) -> Iterator[tuple[str, Path]]:
    """Names, relative to its place, and paths of the files of a top-level module: one, or all of a package's."""
    if found.submodule_search_locations is None:
        if found.has_location and found.origin and (not only_own or is_own(found.origin)):
            yield found.name, Path(found.origin)
        return
    for location in found.submodule_search_locations:
        if only_own and not is_own(location):
            continue
        entered: set[str] = set()  # links may lead round in circles
        for folder, folders, names in os.walk(location, followlinks=True):
            real = os.path.realpath(folder)
            if real in entered:
                folders.clear()
                continue
            entered.add(real)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in names:
                if name.endswith(".py") and not name.startswith("."):
                    path = Path(folder, name)
                    yield f"{found.name}/{path.relative_to(location).as_posix()}", path


def is_own(place: str) -> bool:
    """Whether a file or folder is the user's own: not of Python's library, and not where packages are installed."""
    path = Path(place).resolve()
    return not INSTALLED.intersection(path.parts) and not any(path.is_relative_to(standard) for standard in STANDARD)


def imported(source: bytes) -> set[str]:
    """The top-level modules that a source imports anywhere, by statements or by a literal name.

    Relative imports are left out, as they stay in the package, and so is what is no Python: it cannot be imported.
    """
    try:
        with PARSING, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = parsed(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    nodes = [*ast.walk(tree)]
    importers = {"import_module", "__import__"}
    for node in nodes:  # other names of these
        if isinstance(node, ast.ImportFrom):
            importers |= {alias.asname for alias in node.names if alias.name in importers and alias.asname}
        elif isinstance(node, ast.Assign) and last_name(node.value) in importers:
            importers |= {last_name(target) for target in node.targets}
    names: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.append(node.module)
        elif isinstance(node, ast.Call) and last_name(node.func) in importers:
            given = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "name")]
            names += [
                value.value for value in given if isinstance(value, ast.Constant) and isinstance(value.value, str)
            ]
    return {name.partition(".")[0] for name in names} - {""}


def parsed(source: bytes) -> ast.Module:
    """The tree. Parses again where another thread, of any library, has done so at the same time.

    Python 3.11 counts the depth of all threads' trees in one place, and raises SystemError when the count is wrong.
    """
    for _ in range(PARSED_AGAIN):
        with suppress(SystemError):
            return ast.parse(source)
    return ast.parse(source)


def last_name(node: ast.AST) -> str:
    """Of ``a.b`` or ``b`` the ``b``; empty for anything else."""
    return str(getattr(node, "attr", getattr(node, "id", "")))
