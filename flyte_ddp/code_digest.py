"""Which code computes: a digest of this library's own sources, and the releases of what it computes with."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path

ARITHMETIC = ("torch", "torchvision")


@cache
def library_digest(root: Path = Path(__file__).parent) -> str:
    """SHA-256, in 16 hexadecimal digits, over the names and contents of all Python files of the library.

    Templates do not count: they change what a page looks like, and no result.
    """
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def releases() -> str:
    """Such as ``torch 2.15.0, torchvision 0.29.2``; neither is imported."""
    return ", ".join(f"{name} {version(name)}" for name in ARITHMETIC)
