"""Which code computes: digests of this library's sources, and the releases of what it computes with."""

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

# Folders and files that decide what a run computes. tests/test_code_digest.py names what these import beside them, and
# why it decides nothing.
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
    """Return a SHA-256, in 16 hexadecimal digits, over the code that decides a run's result (DECIDING).

    Comments, docstrings and formatting do not count. Reads and parses each of the files once in a process.
    """
    return files_digest(root, [path for name in DECIDING for path in python_files(root / name)], code_in)


@cache
def package_digest(root: Path = Path(__file__).parent) -> str:
    """Return a SHA-256, in 16 hexadecimal digits, over the bytes of all Python files of the library."""
    return files_digest(root, python_files(root), bytes)


def python_files(place: Path) -> list[Path]:
    """Return the file itself, or all Python files below a folder, in an order that is always the same."""
    return sorted(place.rglob("*.py")) if place.is_dir() else [place]


def files_digest(root: Path, paths: Iterable[Path], counting: Callable[[bytes], bytes]) -> str:
    """Return a SHA-256 of files' names below ``root``, and of what ``counting`` returns for their contents."""
    digest = hashlib.sha256()
    for path in paths:
        content = counting(path.read_bytes())
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def code_in(source: bytes) -> bytes:
    """Return a source without comments, docstrings and formatting, in a form that Python 3.11 to 3.13 agree on.

    What is no Python, or nested too deeply, is returned as it is.
    """
    words: list[str] = []
    try:
        append_node(parse(source), words)
    except NO_PYTHON:
        return source
    return "\n".join(words).encode()


def append_node(node: ast.AST, words: list[str]) -> None:
    """Append a node's type and fields; not statements that do nothing, as docstrings do, nor empty fields."""
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
                append_node(item, words)
            else:
                words.append(repr(item))
    words.append(")")


def parse(source: bytes) -> ast.Module:
    """Return the syntax tree. Warnings are ignored, and no garbage is collected meanwhile.

    A collection takes as long as the parsing itself. It may also let another thread parse in between, which Python 3.11
    takes for an error of its own (SystemError).
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


def releases() -> str:
    """Return such as ``torch 2.15.0, torchvision 0.29.2``, for those of ARITHMETIC that are installed; imports none."""
    found = []
    for name in ARITHMETIC:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)
