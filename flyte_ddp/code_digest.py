"""Which code computes: digests of this library's own sources, and the releases of what it computes with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path

ARITHMETIC = ("torch", "torchvision")


NO_PART_OF_TRAINING = ("export", "pods", "predict", "release", "validation")  # it imports none of these


@cache
def library_digest(root: Path = Path(__file__).parent) -> str:
    """SHA-256, in 16 hexadecimal digits, over the names and contents of all Python files that training may import.

    It says whether a run would end as another one did: so a change of how models are judged retrains none. Templates do
    not count either: they change what a page looks like, and no result.
    """
    return digest_of(
        root, [path for path in sources(root) if path.relative_to(root).parts[0] not in NO_PART_OF_TRAINING]
    )


@cache
def package_digest(root: Path = Path(__file__).parent) -> str:
    """The same over all Python files of the library."""
    return digest_of(root, sources(root))


def sources(root: Path) -> list[Path]:
    """All Python files of the library, in an order that is always the same."""
    return sorted(root.rglob("*.py"))


def digest_of(root: Path, paths: Iterable[Path]) -> str:
    """SHA-256 of files' names below ``root``, and of their contents."""
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def releases() -> str:
    """Such as ``torch 2.15.0, torchvision 0.29.2``; neither is imported."""
    return ", ".join(f"{name} {version(name)}" for name in ARITHMETIC)
