"""Lock run folders, so that one run at a time writes into each; the kernel unlocks a folder when its process dies."""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from flyte_ddp.errors import UserError
from flyte_ddp.files import hold_lock

HELD_FOR_CHILDREN = "FLYTE_DDP_HELD_FOR_CHILDREN"  # id of a process, and the folders that it has locked


class Reservations(threading.local):
    """Locks of run folders that a thread holds for runs that have not begun: tasks cannot pass a lock to each other."""

    def __init__(self) -> None:
        self.locks: dict[Path, ExitStack] = {}


reserved = Reservations()


def reserve_run_folder(folder: Path) -> bool:
    """Lock the folder for a run of this thread, without waiting; return False if another process or run has the lock.

    The folder need not exist. The lock is a file in ``.locks`` beside the folder. It is held until the end of the run,
    which calls :func:`hold_run_folder`, or until :func:`release_run_folder`. A second call in the thread returns True.
    Raises UserError if no file can be created beside the folder.
    """
    folder = folder.resolve()
    if folder not in reserved.locks:
        lock = ExitStack()
        try:
            lock.enter_context(hold_lock(folder.parent / ".locks", folder.name, wait=False))
        except BlockingIOError:
            return False
        except OSError as error:
            raise unwritable_folder_error(folder, error) from None
        reserved.locks[folder] = lock
    return True


@contextmanager
def hold_run_folder(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, reserved by this thread or taken now, until the end of the block.

    Raises UserError if another process or run has it. Takes none if the parent process holds it for its children
    (FLYTE_DDP_HELD_FOR_CHILDREN).
    """
    if not reserve_run_folder(folder):
        holder, *folders = os.environ.get(HELD_FOR_CHILDREN, "").split(os.pathsep)
        if holder != str(os.getppid()) or str(folder.resolve()) not in folders:
            raise UserError(
                f"run folder {folder}: another run is writing into it; wait for its end or name another folder"
            )
    with reserved.locks.pop(folder.resolve(), ExitStack()):
        yield


def release_run_folder(folder: Path) -> None:
    """Unlock the folder if this thread has reserved it."""
    reserved.locks.pop(folder.resolve(), ExitStack()).close()


def release_reserved_folders() -> None:
    """Unlock all folders that this thread has reserved."""
    while reserved.locks:
        reserved.locks.popitem()[1].close()


def reserved_folders_variable() -> dict[str, str]:
    """Return FLYTE_DDP_HELD_FOR_CHILDREN: with it child processes may write into folders this thread has reserved."""
    return {HELD_FOR_CHILDREN: os.pathsep.join([str(os.getpid()), *map(str, reserved.locks)])}


def unwritable_folder_error(folder: Path, error: OSError) -> UserError:
    """Return the error for a run folder that cannot be written to."""
    return UserError(
        f"run folder {folder}: {error.strerror}; it must be writable, so fix its permissions or set FLYTE_DDP_RUNS"
    )
