"""One process at a time writes into a run folder: the kernel lets go of it when that process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

held: dict[Path, int] = {}  # open files by the folders that this process holds


def hold(folder: Path) -> bool:
    """Holds the folder, which need not exist, until this process ends; False if another process has it.

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
        return False
    held[folder] = file
    return True
