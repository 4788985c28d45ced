"""Hold locks on files, which the kernel releases when a process ends."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def hold_lock(folder: Path, name: str, *, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on the empty file ``name`` in ``folder`` during the block; create both if missing.

    Waits without a limit while the lock is held, even by this thread; with ``wait=False`` raises BlockingIOError
    instead. Raises OSError if the folder cannot be written to. The file stays there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        try:
            yield
        finally:
            unlock_file(file.fileno())


def unlock_file(file: int) -> None:
    """Release the lock of an open file descriptor, also for child processes that were forked while it was held."""
    fcntl.flock(file, fcntl.LOCK_UN)
