"""Digests of this library's sources, and the versions of the packages that it computes with."""

import ast
import gc
import hashlib
import threading
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ARITHMETIC = ("torch", "torchvision", "numpy", "pillow", "torchcodec")  # torchcodec is an extra and may be missing

# Folders and files that decide what a run computes. tests/test_code_digest.py lists what else they import and why that
# decides nothing.
DECIDING = (
    *("order", "parallel", "loading", "models", "training", "datasets"),
    *("shards/dataset.py", "shards/decoding.py", "shards/index.py", "shards/samples.py", "shards/tar.py"),
    *("catalog.py", "class_names.py", "confusions.py", "cpu.py", "device_copy.py", "hardware.py", "pictures.py"),
)
SAME_MEANING = {"ctx", "kind", "type_comment"}  # fields of syntax trees that repeat other fields or change nothing
PARSING = threading.Lock()
NO_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)  # what parsing raises for a file that is none


@cache
def library_digest(root: Path = Path(__file__).parent) -> str:
    """Return 16 hexadecimal digits of a SHA-256 over the code that decides a run's result (DECIDING).

    Comments, docstrings and formatting do not count. Reads and parses all of these files, once in a process.
    """
    return hash_files(root, [path for name in DECIDING for path in python_files(root / name)], code_in)


@cache
def package_digest(root: Path = Path(__file__).parent) -> str:
    """Return 16 hexadecimal digits of a SHA-256 over the bytes of the library's Python and TOML files.

    Reads all of these files, once in a process.
    """
    return hash_files(root, package_files(root), bytes)


def package_files(root: Path) -> list[Path]:
    """Return the library's Python and TOML files, all that its code reads when it trains."""
    return [*python_files(root), *sorted(root.rglob("*.toml"))]


def python_files(place: Path) -> list[Path]:
    """Return all Python files below a folder, sorted; for a file the file itself."""
    return sorted(place.rglob("*.py")) if place.is_dir() else [place]


def hash_files(root: Path, paths: Iterable[Path], normalize: Callable[[bytes], bytes]) -> str:
    """Return 16 hexadecimal digits of a SHA-256 over the files' names below ``root`` and their normalized contents."""
    digest = hashlib.sha256()
    for path in paths:
        content = normalize(path.read_bytes())
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def code_in(source: bytes) -> bytes:
    """Return a text of a source's syntax tree, without comments, docstrings and formatting.

    The text is the same under Python 3.11 to 3.13. Returns the source itself if it is no Python or nested too deeply.
    """
    words: list[str] = []
    try:
        append_node_words(parse(source), words)
    except NO_PYTHON:
        return source
    return "\n".join(words).encode()


def append_node_words(node: ast.AST, words: list[str]) -> None:
    """Append the type and the fields of a syntax node and of all nodes below it to ``words``.

    Leaves out empty fields, docstrings and other statements without effect.
    """
    words.append(type(node).__name__)
    for field in node._fields:
        value = getattr(node, field)
        if value is None or value == [] or field in SAME_MEANING:
            continue
        words.append(field)
        for item in value if isinstance(value, list) else (value,):
            if isinstance(item, ast.Pass) or (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)):
                continue
            if isinstance(item, ast.AST):
                append_node_words(item, words)
            else:
                words.append(repr(item))
    words.append(")")


def parse(source: bytes) -> ast.Module:
    """Return the syntax tree of a source. Hides warnings, holds a lock, and turns garbage collection off meanwhile.

    A collection takes as long as the parsing. It may also let another thread run, and Python 3.11 raises SystemError
    when two threads parse at the same time.

    Raises:
        SyntaxError: the source is no Python; another error of NO_PYTHON: it has null bytes or is nested too deeply.
    """
    with PARSING, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collecting = gc.isenabled()
        gc.disable()
        try:
            return ast.parse(source)
        finally:
            if collecting:
                gc.enable()


def list_releases() -> str:
    """Return the versions of those ARITHMETIC packages that are installed, such as ``torch 2.15.0, numpy 2.3.1``.

    Reads the packages' metadata; does not import them.
    """
    found = []
    for name in ARITHMETIC:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)
