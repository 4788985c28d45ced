"""Hold locks on files, which the kernel releases when a process ends."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def hold_lock(folder: Path, name: str, *, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on the file ``name`` in ``folder`` during the block; create both if they are missing.

    Args:
        folder: folder of the file.
        name: the file's name; the file is empty and stays there.
        wait: whether to wait, without a limit, while another thread or process holds the lock.

    Raises:
        BlockingIOError: another thread or process holds the lock, and ``wait`` is false.
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
    """Release the lock of an open file descriptor, also for child processes that were forked while it was held."""
    fcntl.flock(file, fcntl.LOCK_UN)
