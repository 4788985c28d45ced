"""Locks by files in a folder, which the kernel releases when a process ends."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive(folder: Path, name: str, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock, on a file of that name in the folder, that one thread of one process can hold at a time.

    Raises:
        BlockingIOError: another thread or process holds it, and ``wait`` is false.
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
    """Release an open file's lock; closing alone would leave the lock with a child that was forked meanwhile."""
    fcntl.flock(file, fcntl.LOCK_UN)
