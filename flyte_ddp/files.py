"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from flyte_ddp.errors import UserError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A new file that takes the place of ``path`` when the block ends well, and of which nothing stays when it doesn't.

    Readers see the old file or the new one; if it is ``durable``, also after a power cut. Folders above ``path`` are
    made.

    Raises:
        UserError: the disk is full, or the folder cannot be written to. The block's own ``OSError`` counts as such a
            failure to write, so a block that also reads turns the errors of reading into others.

    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                yield file
                if durable:
                    sync(file)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        fix = "free some space" if error.errno in DISK_FULL else "make its folder writable"
        raise UserError(f"cannot write {path}: {error.strerror}; {fix}, or choose another folder") from error


def sync(file: BinaryIO) -> None:
    """Puts what was written so far on the disk, so that a full disk shows now and not later."""
    file.flush()
    os.fsync(file.fileno())
