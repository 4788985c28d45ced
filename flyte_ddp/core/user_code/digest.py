"""Digests of this library's sources, and the versions of the packages that compute results."""

import ast
import gc
import hashlib
import threading
import warnings
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path

version = cache(metadata.version)  # cached, because it reads and parses a file
# torchcodec and simplejpeg are an extra. SciPy draws mixup's shares, and scikit-learn's measures select weights.
ARITHMETIC = ("torch", "torchvision", "numpy", "pillow", "torchcodec", "simplejpeg", "scipy", "scikit-learn")

# The code that decides results. tests/test_code_digest.py lists all other imports, and why they decide nothing.
DECIDING = (
    *(f"core/{name}" for name in ("order", "parallel", "loading", "models", "objectives", "training", "samples")),
    *(f"core/{name}.py" for name in ("machine/resources", "machine/device_copy", "hardware")),
    *("models", "objectives", "plans", "datasets"),
    *("shards/dataset.py", "shards/members.py", "shards/index.py", "shards/tar.py"),
    *("catalog.py", "torchvision_weights.json"),
)
LIBRARY = Path(__file__).parents[2]  # the folder of the package flyte_ddp
PARSING = threading.Lock()
NO_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)  # exceptions of parsing a file that is not Python


@cache
def library_digest(root: Path = LIBRARY) -> str:
    """Return a digest (16 hexadecimal digits) of this library's code that decides a run's result (DECIDING). Cached."""
    return hash_files(root, [path for name in DECIDING for path in list_python_files(root / name)])


@cache
def package_digest(root: Path = LIBRARY) -> str:
    """Return a digest (16 hexadecimal digits) of all Python, TOML and JSON files of this library. Cached."""
    return hash_files(root, list_package_files(root))


def list_package_files(root: Path) -> list[Path]:
    return [*list_python_files(root), *sorted(root.rglob("*.toml")), *sorted(root.rglob("*.json"))]


def list_python_files(place: Path) -> list[Path]:
    return sorted(place.rglob("*.py")) if place.is_dir() else [place]


def hash_files(root: Path, paths: Iterable[Path]) -> str:
    """Return a digest (16 hexadecimal digits) of files and their paths below ``root``, in the given order."""
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def parse_python(source: bytes) -> ast.Module | None:
    """Return the syntax tree of Python source, or None if the source is not Python or nested too deeply.

    Drops warnings, switches the garbage collector off meanwhile, and waits for other threads that parse.
    """
    with PARSING, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collecting = gc.isenabled()
        # A collection takes as long as the parsing, and may let another thread parse: SystemError in Python 3.11.
        gc.disable()
        try:
            return ast.parse(source)
        except NO_PYTHON:
            return None
        finally:
            if collecting:
                gc.enable()


def normalize_code(source: bytes, tree: ast.Module | None) -> bytes:
    """Return code without comments, docstrings, formatting and ``pass``, for digests: ``tree`` as text.

    Changes ``tree``. If ``tree`` is None or nested too deeply, returns ``source``. The text is the same under Python
    3.11 and 3.12, except for a few f-strings.
    """
    if tree is None:
        return source
    for node in ast.walk(tree):
        if getattr(node, "type_params", None) == []:  # Python 3.11 does not have this field
            delattr(node, "type_params")
        for name in ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(node, name, None), list):
                unused = [each for each in block if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)]
                block[:] = [each for each in block if each not in unused and not isinstance(each, ast.Pass)]
    try:
        return ast.dump(tree).encode()
    except RecursionError:
        return source


def format_package_versions() -> str:
    """Return a text with names and versions of the installed packages that compute results, such as "torch 2.9"."""
    found = []
    for name in ARITHMETIC:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)
