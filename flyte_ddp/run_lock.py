"""One process at a time writes into a run folder: the kernel lets go of it when that process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

FOR_CHILDREN_OF = "FLYTE_DDP_HELD_FOR_CHILDREN_OF"  # process id; set by a process that holds folders for children
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
        holder = os.read(file, 20).decode()
        os.close(file)
        return holder == os.environ.get(FOR_CHILDREN_OF) == str(os.getppid())
    os.ftruncate(file, 0)
    os.write(file, str(os.getpid()).encode())
    held[folder] = file
    return True
