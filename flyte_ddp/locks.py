"""Locks by files in a folder, which the kernel releases when a process ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCKS = 1024  # files to lock; shards that share one are fetched one after the other


@contextmanager
def exclusive(folder: Path, name: str, *, wait: bool = True) -> Iterator[None]:
    """Holds a lock that one thread of one process can hold at a time.

    Raises:
        BlockingIOError: somebody else holds it, and it is not to be waited for.
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        try:
            yield
        finally:
            unlock(file.fileno())


def unlock(file: int) -> None:
    """Releases an open file's lock; closing alone would leave it with a child that was forked meanwhile."""
    fcntl.flock(file, fcntl.LOCK_UN)


def lock_again(file: int) -> bool:
    """Locks an open file again; False if it was evicted meanwhile, or is about to be."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if os.fstat(file).st_nlink:
        return True
    unlock(file)
    return False


def stripe(name: str) -> str:
    """The lock that goes with a shard's name."""
    return f"{int(name, 16) % LOCKS:04d}"
