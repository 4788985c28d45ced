"""Find the files of user code without importing them, and compute a digest of the files."""

import ast
import hashlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import click

from flyte_ddp.core.errors import UserError, shorten_path
from flyte_ddp.core.user_code.callables import add_working_directory_to_path, make_missing_module_error, split_spec
from flyte_ddp.core.user_code.digest import ARITHMETIC, LIBRARY, normalize_code, parse_python
from flyte_ddp.core.user_code.modules import find_module_spec, is_user_file, list_module_locations

IDENTIFIED = {"flyte_ddp", *ARITHMETIC}  # packages that are identified by library_digest() or by version
IMPORTERS = ("import_module", "__import__")
STORED_BYTES = 4 * 2**20  # maximum of the sources in a saved model
Source = tuple[str, Path, bytes, ast.Module | None]  # name, path, content, syntax tree (None if not Python)
digested: dict[Path, tuple[ModuleSpec | None, str]] = {}  # by file: import spec (None if not imported), and digest


def compute_user_code_digest(*specs: str) -> str:
    """Return a SHA-256 (hex) of the user's source files that ``specs`` need, without importing the files.

    Comments, docstrings, formatting and the place of the top-level module make no difference. Puts the working
    directory first on ``sys.path``. Records the digest of each file, to notice later changes.

    Raises:
        UserError: A spec is malformed, a module does not exist, or a module that this process imported has changed
            since.
    """
    found = {source[:2]: source for spec in specs for source in iterate_user_sources(spec)}
    return compute_sources_digest(found.values())


def compute_sources_digest(sources: Iterable[Source]) -> str:
    """Return a SHA-256 (hex) of sources, whatever the order. Records the digest of each file in ``digested``.

    Raises:
        UserError: A module that this process imported has changed since.
    """
    lines = []
    for name, path, content, tree in sources:
        digest = hashlib.sha256(normalize_code(content, tree)).hexdigest()
        check_and_record_module_digest(name, path, digest)
        lines.append(f"{name} {digest}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def check_and_record_module_digest(name: str, path: Path, digest: str) -> None:
    """Record the digest of a module's file in ``digested``, and reject a file that was changed after the import.

    ``name`` is the file's path below its import root, such as "pkg/mod.py". If another file was imported as
    this module, nothing is recorded.

    Raises:
        UserError: The file has changed since this process imported the old code. The old digest stays recorded.
    """
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    spec = getattr(sys.modules.get(module), "__spec__", None)  # importlib.reload makes another spec
    if spec is not None and spec.origin != str(path):
        return
    before, old = digested.get(path, (None, digest))
    if spec is not None and (before is None or before is spec) and old != digest:
        digested[path] = spec, old
        raise UserError(
            f"module {module} has changed since it was used: call importlib.reload({module}), or restart the process"
        )
    digested[path] = spec, digest


def read_user_sources(*specs: str) -> dict[str, str]:
    """Return the text of the user's Python files that ``specs`` need, by relative path, without importing the files.

    Skips specs of this library and of the packages in ARITHMETIC. If the files have over 4 MiB, returns {}. Puts the
    working directory first on ``sys.path``.

    Raises:
        UserError: A spec is malformed, or a module does not exist.
    """
    stored_specs = [spec for spec in specs if split_spec(spec)[0].partition(".")[0] not in IDENTIFIED]
    found = {
        name: content
        for spec in stored_specs
        for name, _, content, tree in iterate_user_sources(spec)
        if tree is not None
    }
    if sum(map(len, found.values())) > STORED_BYTES:
        return {}
    return {name: importlib.util.decode_source(content) for name, content in found.items()}


def list_user_files(*specs: str) -> set[Path]:
    return {path.resolve() for spec in specs for _, path, *_ in iterate_user_sources(spec)}


def iterate_user_sources(spec: str) -> Iterator[Source]:
    """Read and yield the source files of user code that ``spec`` (``package.module:callable``) needs, without imports.

    Yields all ``.py`` files of the top-level module, and of the user's modules that these files import. Does not follow
    imports of the standard library, of site-packages, and of IDENTIFIED, nor imports that
    :func:`list_imported_modules` misses. Skips files that cannot be read. Puts the working directory first on
    ``sys.path``.

    Raises:
        UserError: The spec is malformed, or the module does not exist. Raised by the first ``next()``.
    """
    top = split_spec(spec)[0].partition(".")[0]
    add_working_directory_to_path()
    found = find_module_spec(top)
    if found is None:
        raise make_missing_module_error(spec, top)
    yield from follow_imports([*list_module_files(found)], {top, *IDENTIFIED})


def iterate_script_sources(script: Path) -> Iterator[Source]:
    """Read and yield the source of a script, and of the user's modules that the script imports, without imports.

    Puts the working directory first on ``sys.path``.
    """
    add_working_directory_to_path()
    yield from follow_imports([(script.name, script)], {*IDENTIFIED})


def follow_imports(files: list[tuple[str, Path]], seen: set[str]) -> Iterator[Source]:
    """Read and yield the sources of ``files`` (name and path), and of the user's modules that the files import.

    Does not follow imports of modules in ``seen``. Empties ``files``, and adds the imported modules to ``seen``. Skips
    files that cannot be read.
    """
    while files:
        name, path = files.pop()
        try:
            content = path.read_bytes()
        except OSError:  # for example a broken link, which cannot be imported
            continue
        tree = parse_python(content)
        yield name, path, content, tree
        for other in sorted(list_imported_modules(tree) - seen):
            seen.add(other)
            if found := find_module_spec(other):
                files += list_module_files(found, only_own=True)


def list_module_files(found: ModuleSpec, *, only_own: bool = False) -> Iterator[tuple[str, Path]]:
    """Yield name and path of each ``.py`` file of a top-level module. With ``only_own``, yield only user files.

    Links are followed, and hidden files and folders are skipped.
    """
    for place in list_module_locations(found):
        if only_own and not is_user_file(place):
            continue
        if found.submodule_search_locations is None:
            yield Path(place).name, Path(place)
        entered: set[str] = set()  # real paths, because symlinks may lead round in circles
        for folder, folders, names in os.walk(place, followlinks=True):
            if (real := os.path.realpath(folder)) in entered:
                folders.clear()
                continue
            entered.add(real)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for path in (Path(folder, name) for name in names if name.endswith(".py") and not name.startswith(".")):
                yield f"{found.name}/{path.relative_to(place).as_posix()}", path


@contextmanager
def translate_user_errors(what: str) -> Iterator[None]:
    """Turn an exception of user code in the block into a UserError, with the code's line and traceback.

    A UserError passes through, and so does an exception whose traceback has no line of the user's files. ``what``
    begins the error.
    """
    try:
        yield
    except click.ClickException:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        is_own = [is_user_file(each.filename) and not Path(each.filename).is_relative_to(LIBRARY) for each in frames]
        if not any(is_own):
            raise
        line, text = frames[len(is_own) - 1 - is_own[::-1].index(True)], traceback.format_exception_only(error)
        where = f"{shorten_path(Path(line.filename))}:{line.lineno}"
        calls = [(each.filename, each.lineno or 0, each.name, each.line) for each in frames[is_own.index(True) :]]
        trace = "".join([*traceback.StackSummary.from_list(calls).format(), *text])
        raise UserError(f"{what}: {where}: {text[-1].strip()}\n\n{trace}") from error


def list_imported_modules(tree: ast.Module | None) -> set[str]:
    """Return the names of the top-level modules that a source imports.

    Finds absolute imports, and texts in calls of IMPORTERS, such as ``import_module("name")``.
    """
    names: list[str] = []
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.append(node.module or "")
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in IMPORTERS:
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            names += [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return {name.partition(".")[0] for name in names} - {""}


def list_files_outside_digest(known: set[Path], specs: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Return the relative paths of the user's imported files that are not in ``known``, and so not in the digest.

    Starts at the modules of ``specs`` and ``modules``, and follows the namespaces of imported modules. Does not find a
    module from which only numbers, texts or containers were imported. Get ``known`` from :func:`list_user_files` before
    importing user code, because the code may change ``sys.path``.
    """
    names = [split_spec(spec)[0] for spec in specs]
    tops = filter(None, [find_module_spec(name.partition(".")[0]) for name in names])
    places = [place for top in tops for place in (top.submodule_search_locations or [top.origin or ""])]
    folders = {Path(place).resolve().parent for place in places}
    found: dict[Path, str] = {}
    waiting = [sys.modules.get(one) for one in (*names, *modules)]
    while waiting:
        module = waiting.pop()
        file = getattr(module, "__file__", None)
        if module is None or not file or module.__name__.partition(".")[0] in IDENTIFIED or not is_user_file(file):
            continue
        path = Path(file).resolve()
        folder = next((folder for folder in folders if path.is_relative_to(folder)), None)
        if folder and path not in found:
            found[path] = path.relative_to(folder).as_posix()
            for value in vars(module).values():
                owner = str(getattr(value, "__module__", ""))
                waiting.append(value if isinstance(value, ModuleType) else sys.modules.get(owner))
    return sorted(relative for path, relative in found.items() if path not in known)
