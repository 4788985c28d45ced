"""A folder of fetched shards that all ranks, workers and jobs of a machine share.

A process that fetches a shard holds an exclusive lock of that shard. A reader holds a shared lock on the shard's file.
Only files without a lock are evicted, least recently used first. A reader may keep a file open without a lock. Eviction
truncates the file, so that its space is free at once; the reader's next attempt to lock the file fails. The kernel
releases the locks of a process that ends or is killed. The next download removes the partial file of a killed download.
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
from flyte_ddp.locks import hold_lock
from flyte_ddp.shards.index import Shard
from flyte_ddp.shards.verification import (
    has_wrong_size,
    hash_open_file,
    lock_name,
    open_local_shard,
    unusable_shard_error,
)

WHOLE, PARTIAL = ".tar", ".part"
CACHED_NAME = re.compile(rf"[0-9a-f]{{40}}({WHOLE}|{PARTIAL})")  # files with other names are never removed


class CacheFullError(UserError):
    """The cache has no room for another shard until readers have released others."""


@dataclass(frozen=True)
class ShardCache:
    """A folder of fetched shards.

    Args:
        folder: path of the folder; made when it is first needed.
        limit: maximum bytes of all its files; None for no limit but the disk's.
        fetched: how often this process has fetched each shard, by the shard's address.
    """

    folder: Path
    limit: int | None = None
    fetched: Counter[str] = field(default_factory=Counter, compare=False)

    def open(self, shard: Shard) -> BinaryIO:
        """Open a shard and return the open file; download a remote shard that is not in the cache.

        The file has a shared lock, so it is not evicted until it is closed or unlocked. Waits while another process
        downloads the shard. A shard that lies on this machine is opened in its own place.

        Raises:
            DamagedShardError: a shard on this machine has another size or digest than the index says.
            CacheFullError: the cache has no room until readers have released other shards.
            UserError: the shard cannot be fetched, differs from the index, or the cache's folder cannot be written.
        """
        path = storage.local_path(shard.url)
        if path is not None:
            return open_local_shard(path, shard, self.folder)
        with explain_unusable_folder(self.folder):
            file = self.open_fetched_shard(shard)
            if file is None:
                return self.fetch_shard(shard)
            mark_as_used(file.fileno())
            return file

    def open_fetched_shard(self, shard: Shard) -> BinaryIO | None:
        """Open and lock a shard that is in the cache; return None if it is not there or has the wrong size."""
        path = self.shard_path(shard)
        while True:
            try:
                file = path.open("rb")
            except FileNotFoundError:
                return None
            fcntl.flock(file, fcntl.LOCK_SH)
            if is_still_at(file, path):
                break
            file.close()  # it was evicted between open and flock
        if has_wrong_size(file, shard):
            file.close()
            return None
        return file

    def holds(self, shard: Shard) -> bool:
        """Return whether the shard lies on this machine or in the cache; does not compare it with the index."""
        return storage.local_path(shard.url) is not None or self.shard_path(shard).exists()

    def heal(self, shard: Shard, *, damaged: bool = False) -> bool:
        """Remove a damaged shard from the cache, even while it is read; return whether the next open fetches it again.

        Reads the whole file to compute its digest. Removes nothing, and returns False, if the digest is right, if the
        shard lies on this machine in its own place, or if the cache's folder cannot be written.

        Args:
            shard: the shard's entry in the index.
            damaged: whether the shard could not be read; decides if the index has no digest.
        """
        if storage.local_path(shard.url) is not None or not os.access(self.folder, os.W_OK):
            return False
        with explain_unusable_folder(self.folder), self.hold_lock(lock_name(self.shard_path(shard).stem)):
            file = self.open_fetched_shard(shard)
            if file is not None:
                with file:
                    kind, wanted = shard.digest
                    if hash_open_file(file, kind) == wanted if wanted else not damaged:
                        return False
            self.shard_path(shard).unlink(missing_ok=True)
            return True

    def shard_path(self, shard: Shard) -> Path:
        """Return the path of a shard in the cache; a shard with another address, size or digest has another path."""
        identity = f"{shard.url}\n{shard.size}\n{shard.digest[1]}"
        return self.folder / f"{hashlib.sha256(identity.encode('utf-8', 'surrogatepass')).hexdigest()[:40]}{WHOLE}"

    def fetch_shard(self, shard: Shard) -> BinaryIO:
        """Download a shard into the cache with retries, and return its open file with a shared lock.

        Waits for the shard's lock. Downloads nothing if another process has fetched the shard meanwhile. Evicts other
        shards to make room. Counts the download in ``fetched``. Removes the partial file after a failure.

        Raises:
            CacheFullError: the cache has no room until readers have released other shards.
            UserError: the shard cannot be fetched, or differs from the index.
        """
        path = self.shard_path(shard)
        part = path.with_suffix(PARTIAL)
        with self.hold_lock(lock_name(path.stem)):
            if file := self.open_fetched_shard(shard):
                return file
            path.unlink(missing_ok=True)  # a copy with the wrong size
            try:
                with part.open("wb", buffering=0) as target:  # "wb" truncates the remains of a killed download
                    if shard.size >= 0:
                        self.reserve_space(target, shard.size)
                    storage.retry(shard.url, lambda _: self.download_once(shard, target))
                    os.fsync(target.fileno())  # else a power cut could leave the final name without the content
                self.fetched[shard.url] += 1
                return self.publish_download(part, path)
            except storage.UnavailableError as failure:
                raise unusable_shard_error(shard, failure) from None
            finally:
                part.unlink(missing_ok=True)

    def publish_download(self, part: Path, path: Path) -> BinaryIO:
        """Rename a complete download from ``part`` to ``path``; return its open file with a shared lock."""
        with ExitStack() as on_failure:
            file = on_failure.enter_context(part.open("rb"))
            fcntl.flock(file, fcntl.LOCK_SH)  # before the rename: nobody can evict the file under its final name
            mark_as_used(file.fileno())
            with self.hold_lock("room"):  # a process that sums up the files must not see this one twice or not at all
                part.rename(path)
            on_failure.pop_all()
        return file

    def download_once(self, shard: Shard, target: io.FileIO) -> None:
        """Download a shard into an open file, and compare its size and digest with the index. Does not retry.

        Overwrites the file from its start. Evicts other shards if the disk or the cache is full.

        Raises:
            AlteredError: the size or the digest differs from the index; transient.
            UnavailableError: the shard cannot be read.
            CacheFullError: the cache has no room until readers have released other shards.
        """
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
                    self.reserve_space(target, expected or end)
                self.write_chunk(target, chunk)
                digest.update(chunk)
        storage.check_length(target.tell(), expected, remote=True)
        if wanted and digest.hexdigest() != wanted:
            raise storage.AlteredError(f"{kind} {digest.hexdigest()} instead of {wanted}", transient=True)
        target.truncate()

    def write_chunk(self, file: io.FileIO, chunk: bytes) -> None:
        """Write all bytes to a file. If the disk is full, evict the least recently used unlocked shard and go on.

        Raises OSError if the disk is full and no shard can be evicted, or for another failure.
        """
        rest = memoryview(chunk)
        while rest:
            try:
                rest = rest[file.write(rest) :]
            except OSError as error:
                wholes = (path for _, _, path in self.list_oldest_first() if path.suffix == WHOLE)
                # any() stops at the first eviction that frees space.
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not any(map(self.evict_file, wholes)):
                    raise

    def reserve_space(self, file: io.FileIO, size: int) -> None:
        """Set an open file's size to ``size`` bytes, and evict unlocked shards until the folder is within its limit.

        Also removes partial files of killed downloads. Waits for the lock ``room``.

        Raises:
            CacheFullError: shards in use and other downloads leave no room.
            UserError: ``size`` is larger than the limit.
        """
        if self.limit is not None and size > self.limit:
            raise UserError(
                f"shard cache {self.folder}: its limit of {self.limit:,} bytes is less than the {size:,} of one shard; "
                "raise FLYTE_DDP_CACHE_BYTES"
            )
        with self.hold_lock("room"):
            for part in self.folder.glob(f"*{PARTIAL}"):
                if CACHED_NAME.fullmatch(part.name):
                    # A download in progress holds its shard's lock; without a holder, the download was killed.
                    with suppress(BlockingIOError), self.hold_lock(lock_name(part.stem), wait=False):
                        part.unlink(missing_ok=True)
            if self.limit is not None:
                entries = self.list_oldest_first()
                used = sum(size for _, size, _ in entries)
                excess = used + size - os.fstat(file.fileno()).st_size - self.limit
                for _, _, path in entries:
                    if excess > 0 and path.suffix == WHOLE:
                        excess -= self.evict_file(path)
                if excess > 0:
                    raise CacheFullError(
                        f"shard cache {self.folder}: its limit of {self.limit:,} bytes is too low by {excess:,} for "
                        "the shards that are read at the same time; raise FLYTE_DDP_CACHE_BYTES"
                    )
            os.ftruncate(file.fileno(), size)

    def list_oldest_first(self) -> list[tuple[int, int, Path]]:
        """Return the time of last use (nanoseconds), size (bytes) and path of each file of the cache, oldest first."""
        files = []
        for path in self.folder.iterdir():
            if CACHED_NAME.fullmatch(path.name):
                with suppress(FileNotFoundError):  # removed by another process
                    status = path.stat()
                    files.append((status.st_mtime_ns, status.st_size, path))
        return sorted(files)

    def evict_file(self, path: Path) -> int:
        """Truncate and remove a cached shard, and return the freed bytes; return 0 if a reader holds its lock."""
        with suppress(FileNotFoundError, PermissionError), path.open("r+b") as file, suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_still_at(file, path):
                size = os.fstat(file.fileno()).st_size
                path.unlink()
                file.truncate(0)  # a reader may have the file open without a lock, which would keep its space
                return size
        return 0

    def hold_lock(self, name: str, *, wait: bool = True) -> AbstractContextManager[None]:
        """Hold an exclusive lock of this folder in a block: ``room``, or the :func:`lock_name` of a shard.

        Raises BlockingIOError if another thread or process holds the lock and ``wait`` is false.
        """
        return hold_lock(self.folder / "locks", name, wait=wait)


def mark_as_used(file: int) -> None:
    """Set the times of an open file (a descriptor) to now; do nothing if the file cannot be changed."""
    with suppress(OSError):  # the cache may be read-only
        os.utime(file, ns=(time.time_ns(),) * 2)  # the kernel's own clock for files goes in steps of milliseconds


def is_still_at(file: BinaryIO, path: Path) -> bool:
    """Return whether ``path`` still names the open file, and not another file or none."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def explain_unusable_folder(folder: Path) -> Iterator[None]:
    """Raise the block's OSErrors as UserErrors, with the advice to free space or to make the folder writable."""
    try:
        yield
    except OSError as error:
        fix = "free some space" if error.errno in DISK_FULL else "make it writable"
        raise UserError(
            f"shard cache {folder}: {error.strerror}; {fix}, or set FLYTE_DDP_CACHE to another folder"
        ) from error
