"""Atomic writes, file locks, and SHA-256 digests of files."""

import errno
import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO
from weakref import WeakSet

from flyte_ddp.core.errors import UserError

WEIGHTS, SIDECAR = "model.pt", "model.json"  # of a trained model
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FAILING = (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EREMOTEIO)  # errors of a disk or a file server
held: WeakSet[BinaryIO] = WeakSet()  # files that this process locks


@contextmanager
def atomic_write(path: Path, *, durable: bool = True, create: bool = False) -> Iterator[BinaryIO]:
    """Yield a temporary file, and rename the file to ``path`` when the block succeeds.

    If the block fails, removes the temporary file, and does not change ``path``. Creates missing folders. Several
    threads and processes may write the same path, and the last write wins.

    Args:
        path: The file to write.
        durable: Whether to flush the content to disk (fsync) first. A power cut then leaves the old file or the new
            file.
        create: Whether to raise FileExistsError if ``path`` exists. If True, also flushes the folder.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("wb") as file:
            yield file
            if durable:
                sync(file)
        if create:
            os.link(temporary, path)  # fails if the path exists, so only one of several processes can succeed
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)  # else a power cut could undo the new name
            finally:
                os.close(folder)
        else:
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replace_file(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Yield a file that replaces ``path`` when the block succeeds.

    If the block fails, ``path`` is unchanged. Creates missing folders. ``durable`` flushes the content to disk (fsync)
    first.

    Raises:
        UserError: The file cannot be written.
    """
    with explain_write_errors(path), atomic_write(path, durable=durable) as file:
        yield file


@contextmanager
def explain_write_errors(path: Path, other: str = "choose another folder") -> Iterator[None]:
    """Turn an OSError of the block, which must only write ``path``, into a UserError with the reason and two fixes.

    Does the same with a RuntimeError that an OSError has caused, as in torch.save. The first fix depends on the reason,
    and the second fix is ``other``.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        # When a write fails, torch.save may raise a RuntimeError about the file's position. Its context is the OSError.
        reason = error if isinstance(error, OSError) else error.__context__
        if not isinstance(reason, OSError):
            raise
        raise UserError(f"cannot write {path}: {reason.strerror}; {suggest_write_fix(reason)}, or {other}") from reason


def suggest_write_fix(error: OSError, folder: str = "its folder") -> str:
    """Return a text that tells how to fix an OSError of a write, such as "free some space".

    ``folder`` is the name of the file's folder in the text.
    """
    if error.errno in DISK_FULL:
        return "free some space"
    return "repair its disk or file server" if error.errno in FAILING else f"make {folder} writable"


@dataclass(frozen=True)
class FilePiece:
    """A piece of a file, or the whole file."""

    name: str  # path of the file below the receiver's folder
    content: bytes
    offset: int = 0  # place of the piece in bytes
    is_last: bool = True

    def write(self, path: Path, partial: Path) -> None:
        """Write the piece into the file ``partial``, which the last piece renames to ``path``.

        Bytes of the file after the piece are cut off. Creates missing folders.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("r+b" if self.offset else "wb") as file:
            file.seek(self.offset)
            file.truncate()
            file.write(self.content)
        if self.is_last:
            partial.replace(path)


class HashingFile:
    """Writes to a file, and computes the SHA-256 of the written bytes.

    The class has no ``fileno``, so torch.save writes through Python, where a full disk raises an ``OSError``.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.sha256 = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file in hex, as ``sha256sum`` prints it."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_files(folder: Path) -> list[Path]:
    """Return the files below a folder, also hidden files, sorted. If the folder does not exist, returns [].

    Links to folders are not followed. Skips folders that vanish meanwhile or cannot be read.
    """
    return sorted(path for root, _, names in os.walk(folder) for name in names if (path := Path(root, name)).is_file())


def get_file_version(path: Path) -> tuple[int, int, int] | None:
    """Return a file's inode, modification time (ns) and size, by which a change of the file is noticed.

    Returns None if the file does not exist. A change to the same size within a tick of the file system's clock is not
    noticed.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


@contextmanager
def hold_lock(folder: Path, name: str, *, wait: bool = True) -> Iterator[BinaryIO]:
    """Hold an exclusive lock on the file ``name`` in ``folder`` during the block.

    Yields the file, open for appending. Creates a missing folder or file, and keeps the file. When the process ends,
    the kernel releases the lock, even if forked child processes still run. The lock is not re-entrant: with
    ``wait``, a second call in the block waits forever.

    Args:
        folder: The folder of the file.
        name: The name of the file.
        wait: If the lock is held, True waits without a limit, and False raises BlockingIOError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("ab", buffering=0) as file:
        held.add(file)
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        try:
            yield file
        finally:
            if not file.closed:  # close_inherited_lock_files has closed it in a fork
                unlock_file(file.fileno())


def close_inherited_lock_files() -> None:
    """Close, in a forked child, the lock files of the parent process, because open files would keep the locks."""
    for file in list(held):
        file.close()


os.register_at_fork(after_in_child=close_inherited_lock_files)


def unlock_file(file: int) -> None:
    """Release the lock of an open file descriptor, also for child processes that have the file open."""
    fcntl.flock(file, fcntl.LOCK_UN)
