"""Shards on this machine's disk, fetched once for all ranks, workers and jobs that want them.

A process that fetches a shard holds a lock. A reader holds a shared lock on the file itself, and only unlocked files
are evicted, least recently used first. A file may stay open without a lock, to be read from again. Eviction empties it,
so that its space is free at once, and the next attempt to lock it fails. The kernel releases the locks of a process
that ends, however it ends. A killed download leaves a partial file, which the next download removes.
"""

import errno
import fcntl
import hashlib
import io
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.files import DISK_FULL
from flyte_ddp.locks import exclusive
from flyte_ddp.shards.index import Shard
from flyte_ddp.shards.verification import explain_failure, file_digest, has_wrong_size, lock_name, open_local

WHOLE, PARTIAL = ".tar", ".part"
OURS = re.compile(rf"[0-9a-f]{{40}}({WHOLE}|{PARTIAL})")  # other files in the folder stay


class CacheFullError(UserError):
    """The shards that are being read leave no room for another one; there is some when that is over."""


@dataclass(frozen=True)
class ShardCache:
    """A folder of fetched shards.

    Args:
        folder: made if it is not there.
        limit: most bytes that it may hold; None sets no limit but the disk's.
        fetched: how often this process has fetched each shard, by its address.
    """

    folder: Path
    limit: int | None = None
    fetched: Counter[str] = field(default_factory=Counter, compare=False)

    def open(self, shard: Shard) -> BinaryIO:
        """Return the shard as a file that is not evicted until it is closed or unlocked; fetch it if it is not here.

        A shard on this machine is opened where it is.

        Raises:
            DamagedShardError: a shard on this machine does not have the length or the digest that the index says.
            CacheFullError: there is no room for it as long as others are open.
            UserError: it cannot be had, or is not what the index says.
        """
        path = storage.local_path(shard.url)
        if path is not None:
            return open_local(path, shard, self.folder)
        with explain_unusable(self.folder):
            file = self.open_fetched(shard)
            if file is None:
                return self.fetch(shard)
            mark_used(file.fileno())
            return file

    def open_fetched(self, shard: Shard) -> BinaryIO | None:
        """Return the file of a shard that was fetched before; None if there is none, or it has the wrong length."""
        path = self.path_of(shard)
        while True:
            try:
                file = path.open("rb")
            except FileNotFoundError:
                return None
            fcntl.flock(file, fcntl.LOCK_SH)
            if is_same_file(file, path):
                break
            file.close()  # it was removed in between
        if has_wrong_size(file, shard):
            file.close()
            return None
        return file

    def holds(self, shard: Shard) -> bool:
        """Return whether the shard is on this machine, without looking into it."""
        return storage.local_path(shard.url) is not None or self.path_of(shard).exists()

    def heal(self, shard: Shard, *, damaged: bool = False) -> bool:
        """Remove a fetched shard that is damaged; return False if it is as it was fetched, or if nobody can know.

        ``damaged`` says that it could not be read, which counts where the index has no digest.
        """
        if storage.local_path(shard.url) is not None or not os.access(self.folder, os.W_OK):
            return False
        with explain_unusable(self.folder), self.lock(lock_name(self.path_of(shard).stem)):
            file = self.open_fetched(shard)
            if file is not None:
                with file:
                    kind, wanted = shard.digest
                    if file_digest(file, kind) == wanted if wanted else not damaged:
                        return False
            self.path_of(shard).unlink(missing_ok=True)  # even if somebody reads it, or has removed it by now
            return True

    def path_of(self, shard: Shard) -> Path:
        """Return where the shard is kept: a name that no shard of another address or content has."""
        identity = f"{shard.url}\n{shard.size}\n{shard.digest[1]}"
        return self.folder / f"{hashlib.sha256(identity.encode('utf-8', 'surrogatepass')).hexdigest()[:40]}{WHOLE}"

    def fetch(self, shard: Shard) -> BinaryIO:
        """Download and open the shard, unless another process has done so by then."""
        path = self.path_of(shard)
        part = path.with_suffix(PARTIAL)
        with self.lock(lock_name(path.stem)):
            if file := self.open_fetched(shard):
                return file
            path.unlink(missing_ok=True)  # a copy that is damaged
            try:
                with part.open("wb", buffering=0) as target:  # empties what a killed download has left
                    if shard.size >= 0:
                        self.reserve(target, shard.size)
                    storage.retried(shard.url, lambda _: self.download(shard, target))
                    os.fsync(target.fileno())  # so that a power cut cannot leave the name without the content
                self.fetched[shard.url] += 1
                return self.publish(part, path)
            except storage.UnavailableError as failure:
                raise explain_failure(shard, failure) from None
            finally:
                part.unlink(missing_ok=True)

    def publish(self, part: Path, path: Path) -> BinaryIO:
        """Rename a complete file, and return it open, with the lock that keeps it from being evicted."""
        with ExitStack() as on_failure:
            file = on_failure.enter_context(part.open("rb"))
            fcntl.flock(file, fcntl.LOCK_SH)
            mark_used(file.fileno())
            with self.lock("room"):  # so that who counts what is there finds it under one name
                part.rename(path)
            on_failure.pop_all()
        return file

    def download(self, shard: Shard, target: io.FileIO) -> None:
        """Write a shard into a file, in one try; raise UnavailableError if it is not what the index says."""
        kind, wanted = shard.digest
        digest = hashlib.new(kind, usedforsecurity=False)
        with storage.open_file(shard.url) as file:
            expected = shard.size if shard.size >= 0 else file.size
            if file.size not in (None, expected):
                raise storage.AlteredError(f"{file.size:,} bytes instead of {expected:,}", transient=True)
            target.seek(0)
            for chunk in file.chunks:
                end = target.tell() + len(chunk)
                if expected is not None and end > expected:
                    raise storage.AlteredError(f"more than {expected:,} bytes", transient=True)
                if end > os.fstat(target.fileno()).st_size:
                    self.reserve(target, expected or end)
                self.write(target, chunk)
                digest.update(chunk)
        storage.check_length(target.tell(), expected, remote=True)
        if wanted and digest.hexdigest() != wanted:
            raise storage.AlteredError(f"{kind} {digest.hexdigest()} instead of {wanted}", transient=True)
        target.truncate()

    def write(self, file: io.FileIO, chunk: bytes) -> None:
        """Write all bytes to a file, and evict the least recently used shard each time the disk is full."""
        rest = memoryview(chunk)
        while rest:
            try:
                rest = rest[file.write(rest) :]
            except OSError as error:
                wholes = (path for _, _, path in self.list_oldest_first() if path.suffix == WHOLE)
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not any(map(self.evict, wholes)):
                    raise

    def reserve(self, file: io.FileIO, size: int) -> None:
        """Make a file as long as it will be, and evict shards so that the folder stays within its limit.

        Raises CacheFullError if the shards in use and those being fetched leave no room.
        """
        if self.limit is not None and size > self.limit:
            raise UserError(
                f"shard cache {self.folder}: its limit of {self.limit:,} bytes is less than the {size:,} of one shard; "
                "raise FLYTE_DDP_CACHE_BYTES"
            )
        with self.lock("room"):
            for part in self.folder.glob(f"*{PARTIAL}"):  # whose download was killed, if nobody has the shard's lock
                if OURS.fullmatch(part.name):
                    with suppress(BlockingIOError), self.lock(lock_name(part.stem), wait=False):
                        part.unlink(missing_ok=True)
            if self.limit is not None:
                entries = self.list_oldest_first()
                used = sum(size for _, size, _ in entries)
                excess = used + size - os.fstat(file.fileno()).st_size - self.limit
                for _, _, path in entries:
                    if excess > 0 and path.suffix == WHOLE:
                        excess -= self.evict(path)
                if excess > 0:
                    raise CacheFullError(
                        f"shard cache {self.folder}: its limit of {self.limit:,} bytes is too low by {excess:,} for "
                        "the shards that are read at the same moment; raise FLYTE_DDP_CACHE_BYTES"
                    )
            os.ftruncate(file.fileno(), size)

    def list_oldest_first(self) -> list[tuple[int, int, Path]]:
        """Return time of last use (nanoseconds), size and path of each file of the cache, in the order of the times."""
        found = []
        for path in self.folder.iterdir():
            if OURS.fullmatch(path.name):
                with suppress(FileNotFoundError):  # removed meanwhile
                    status = path.stat()
                    found.append((status.st_mtime_ns, status.st_size, path))
        return sorted(found)

    def evict(self, path: Path) -> int:
        """Remove a shard unless somebody reads it; return how many bytes that freed."""
        with suppress(FileNotFoundError, PermissionError), path.open("r+b") as file, suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_same_file(file, path):
                size = os.fstat(file.fileno()).st_size
                path.unlink()
                file.truncate(0)
                return size
        return 0

    def lock(self, name: str, *, wait: bool = True) -> AbstractContextManager[None]:
        """Hold one of the folder's locks in a block: ``room``, or a shard's; see :func:`flyte_ddp.locks.exclusive`."""
        return exclusive(self.folder / "locks", name, wait=wait)


def mark_used(file: int) -> None:
    """Set the time of an open file's last use to now; do nothing if that is not allowed."""
    with suppress(OSError):  # a cache that was filled before and is read-only now will do as well
        os.utime(file, ns=(time.time_ns(),) * 2)  # the system's own clock for files goes in larger steps


def is_same_file(file: BinaryIO, path: Path) -> bool:
    """Return whether the open file is still the one at the path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def explain_unusable(folder: Path) -> Iterator[None]:
    """Raise OSErrors of the block as UserErrors that say what to do about a folder that is full or not writable."""
    try:
        yield
    except OSError as error:
        fix = "free some space" if error.errno in DISK_FULL else "make it writable"
        raise UserError(
            f"shard cache {folder}: {error.strerror}; {fix}, or set FLYTE_DDP_CACHE to another folder"
        ) from error
