"""A digest of this library's own sources: part of every cache key, so that changed code trains anew."""

from __future__ import annotations

import hashlib
from pathlib import Path


def library_digest(root: Path = Path(__file__).parent) -> str:
    """SHA-256, in 16 hexadecimal digits, over the names and contents of all Python files of the library."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]
