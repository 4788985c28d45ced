"""One run at a time writes into a run folder, in this process or in another; the kernel lets go of it when one dies."""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from flyte_ddp.errors import UserError
from flyte_ddp.locks import exclusive

HELD_FOR_CHILDREN = "FLYTE_DDP_HELD_FOR_CHILDREN"  # a process, and the folders that it holds


class Reservations(threading.local):
    """The locks of folders that a thread keeps for runs which have not begun: tasks cannot hand each other a lock."""

    def __init__(self) -> None:
        self.locks: dict[Path, ExitStack] = {}


reserved = Reservations()


def reserve(folder: Path) -> bool:
    """Lock the folder, which need not exist, for a run of this thread; return False if another process or run has it.

    The lock, a file in ``.locks`` beside the folder, is kept until that run, which calls :func:`hold`, has ended, or
    until :func:`release`.

    Raises:
        UserError: no file can be made beside the folder.
    """
    folder = folder.resolve()
    if folder not in reserved.locks:
        lock = ExitStack()
        try:
            lock.enter_context(exclusive(folder.parent / ".locks", folder.name, wait=False))
        except BlockingIOError:
            return False
        except OSError as error:
            raise not_writable(folder, error) from None
        reserved.locks[folder] = lock
    return True


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold the folder, reserved or not, until the end of the block; UserError if another process or run has it."""
    if not reserve(folder) and not held_by_parent(folder):
        raise UserError(f"run folder {folder}: another run is writing into it; wait for its end or name another")
    with reserved.locks.pop(folder.resolve(), ExitStack()):
        yield


def release(folder: Path) -> None:
    """Unlock the folder, if this thread has reserved it."""
    reserved.locks.pop(folder.resolve(), ExitStack()).close()


def release_reserved() -> None:
    """Unlock all folders that this thread has reserved."""
    for folder in [*reserved.locks]:
        release(folder)


def held_by_parent(folder: Path) -> bool:
    """Return whether the process that started this one holds the folder for it."""
    holder, *folders = os.environ.get(HELD_FOR_CHILDREN, "").split(os.pathsep)
    return holder == str(os.getppid()) and str(folder.resolve()) in folders


def held_for_children() -> dict[str, str]:
    """Return the environment that lets child processes of this thread write into the folders that it has reserved."""
    return {HELD_FOR_CHILDREN: os.pathsep.join([str(os.getpid()), *map(str, reserved.locks)])}


def not_writable(folder: Path, error: OSError) -> UserError:
    """Return the error for a run folder in which nothing can be made."""
    return UserError(
        f"run folder {folder}: {error.strerror}; it must be writable, so fix its permissions or set FLYTE_DDP_RUNS"
    )
