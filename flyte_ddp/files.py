"""Files that appear whole or not at all, and their digests."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

from flyte_ddp.errors import UserError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A new file that replaces ``path`` if the block succeeds, and is removed if it does not.

    Readers see the old file or the new one; if it is ``durable``, also after a power cut. Missing folders are made. An
    ``OSError`` in the block is taken for a failure to write and becomes a ``UserError``, so a block that also reads
    must turn errors of reading into others.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
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
    except (OSError, RuntimeError) as error:
        # If a write fails, torch.save may end with an error about the position, after the one that says why.
        reason = error if isinstance(error, OSError) else error.__context__
        if not isinstance(reason, OSError):
            raise
        fix = "free some space" if reason.errno in DISK_FULL else "make its folder writable"
        raise UserError(f"cannot write {path}: {reason.strerror}; {fix}, or choose another folder") from reason


class HashingFile:
    """A file that computes the SHA-256 of what is written to it.

    It has no ``fileno``, so torch writes through Python, where a full disk is an ``OSError``.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.sha256 = hashlib.sha256()

    def write(self, data: bytes) -> int:
        """Writes and takes into the digest."""
        self.sha256.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        """Flushes the file beneath."""
        self.file.flush()


def sync(file: IO[Any]) -> None:
    """Puts what was written so far on the disk: a full disk is an error now, and a power cut loses nothing of it."""
    file.flush()
    os.fsync(file.fileno())


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hex, as ``sha256sum`` prints it."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
