"""One process at a time writes into a run folder: the kernel lets go of it when that process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

HELD_FOR_CHILDREN = "FLYTE_DDP_HELD_FOR_CHILDREN"  # a process, and the folders that it holds
held: dict[Path, int] = {}  # open files by the folders that this process holds


def hold(folder: Path) -> bool:
    """Holds the folder, which need not exist, until this process ends; False if another process has it.

    Where it was held for this process by the one that started it, that is the same.

    Raises:
        OSError: no file can be made beside the folder.

    """
    folder = folder.resolve()
    if folder in held:
        return True
    path = folder.parent / ".locks" / folder.name
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        holder, *folders = os.environ.get(HELD_FOR_CHILDREN, "").split(os.pathsep)
        return holder == str(os.getppid()) and str(folder) in folders
    held[folder] = file
    return True


def held_for_children() -> dict[str, str]:
    """What of the environment lets processes that this one starts write into the folders that it holds."""
    return {HELD_FOR_CHILDREN: os.pathsep.join([str(os.getpid()), *map(str, held)])}
