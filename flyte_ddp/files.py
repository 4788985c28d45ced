"""Files that appear whole or not at all, and their digests."""

import errno
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

from flyte_ddp.errors import UserError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def atomic_write(path: Path, *, durable: bool = True, create: bool = False) -> Iterator[BinaryIO]:
    """Yield a new file that gets the name ``path`` when the block succeeds, and is removed when the block fails.

    Makes missing folders. Readers see the old file or the whole new one. The temporary name is unique, so several
    threads and processes may write one path; the last one wins.

    Args:
        path: of the file to write.
        durable: whether the content is put on the disk before the file gets its name, so that a power cut leaves the
            old file or the new one.
        create: whether a file that has the name already is kept, and FileExistsError raised. The name is put on the
            disk as well.

    Raises:
        OSError: the file cannot be written; also what the block raises.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("wb") as file:
            yield file
            if durable:
                sync(file)
        if create:
            os.link(temporary, path)  # which only one process can do
            sync_folder(path.parent)
        else:
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Yield a new file that replaces ``path``, by :func:`atomic_write`; its OSErrors become a UserError with advice.

    An OSError in the block is taken for a failure to write, so a block that also reads must turn errors of reading
    into others.
    """
    try:
        with atomic_write(path, durable=durable) as file:
            yield file
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
        """Write data to the file and into the digest; return how many bytes were written."""
        self.sha256.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        """Flush the file that data goes to."""
        self.file.flush()


def sync(file: IO[Any]) -> None:
    """Put what was written so far on the disk: a full disk is an OSError now, and a power cut loses nothing of it."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk, so that a power cut does not take them back."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hex, as ``sha256sum`` prints it."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
