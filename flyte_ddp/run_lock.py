"""One run at a time writes into a run folder, in this process or in another; the kernel lets go of it when one dies."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HELD_FOR_CHILDREN = "FLYTE_DDP_HELD_FOR_CHILDREN"  # a process, and the folders that it holds


@dataclass
class Held:
    """A folder that this process holds."""

    file: int | None  # open and locked; None if the process that started this one holds the folder for it
    thread: int  # that reserved it
    in_use: bool = False  # by a run


held: dict[Path, Held] = {}
guard = threading.Lock()


def reserve(folder: Path) -> bool:
    """Keeps the folder, which need not exist, for a run of this thread's; False if another process or run has it.

    Until that run, which :func:`hold` makes known, has ended, or :func:`release` or :func:`release_reserved` is called.

    Raises:
        OSError: no file can be made beside the folder.

    """
    folder = folder.resolve()
    with guard:
        found = held.get(folder)
        if found is None:
            locked, file = lock(folder)
            if locked:
                held[folder] = Held(file, threading.get_ident())
            return locked
        return not found.in_use and found.thread == threading.get_ident()


@contextmanager
def hold(folder: Path) -> Iterator[bool]:
    """Holds the folder, reserved or not, until the end of the block; yields False if another process or run has it.

    Raises:
        OSError: no file can be made beside the folder.

    """
    reserve(folder)
    with guard:
        found = held.get(folder.resolve())
        mine = found is not None and not found.in_use
        if found is not None:
            found.in_use = True
    try:
        yield mine
    finally:
        if mine:
            release(folder)


def release(folder: Path) -> None:
    """Lets go of the folder, if this process holds it."""
    with guard:
        found = held.pop(folder.resolve(), None)
        if found is not None and found.file is not None:
            fcntl.flock(found.file, fcntl.LOCK_UN)  # closing is not enough where a fork has the file as well
            os.close(found.file)


def release_reserved() -> None:
    """Lets go of what this thread has reserved for runs that have not begun."""
    for folder, found in [*held.items()]:
        if not found.in_use and found.thread == threading.get_ident():
            release(folder)


def lock(folder: Path) -> tuple[bool, int | None]:
    """Whether this process has the folder now, and the locked file, unless its parent has that."""
    path = folder.parent / ".locks" / folder.name
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        holder, *folders = os.environ.get(HELD_FOR_CHILDREN, "").split(os.pathsep)
        return holder == str(os.getppid()) and str(folder) in folders, None
    return True, file


def held_for_children() -> dict[str, str]:
    """What of the environment lets processes that this one starts write into the folders that it holds."""
    return {HELD_FOR_CHILDREN: os.pathsep.join([str(os.getpid()), *map(str, held)])}
