"""Open shards: local shards in place, and remote shards in a cache folder that all processes of a machine share.

A process that downloads a shard holds an exclusive lock of that shard. A reader holds a shared lock on the shard's
file. Only files without a lock are evicted, least recently used first. A reader may keep a file open without a lock.
Eviction truncates the file to free the space at once, and the reader's next attempt to lock the file fails. The kernel
releases the locks of a process that ends or is killed. The next download removes the partial file of a killed download.
"""

import errno
import fcntl
import hashlib
import io
import os
import re
import stat
import time
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from flyte_ddp import storage
from flyte_ddp.core.errors import UserError, print_to_stderr
from flyte_ddp.core.files import explain_write_errors, hold_lock
from flyte_ddp.shards.index import Shard

LOCKS = 1024  # number of lock files: two shards with the same lock are downloaded one after the other
WHOLE, PARTIAL = ".tar", ".part"
CACHED_NAME = re.compile(rf"[0-9a-f]{{40}}({WHOLE}|{PARTIAL})")  # files with other names are never removed


class CacheFullError(UserError):
    """The cache has no room for another shard until readers release shards."""


@dataclass(frozen=True)
class ShardCache:
    """A folder of fetched shards."""

    folder: Path  # created at first use
    limit: int | None = None  # maximum bytes of all files in the folder, or None for the disk's limit

    def open_or_download_shard(self, shard: Shard) -> BinaryIO:
        """Return a shard as an open file, which the caller must close.

        A remote shard that is not cached is downloaded, in up to 4 tries with pauses. The download may evict other
        shards. While the file of a remote shard is open, the shard is not evicted. If another process is downloading
        the shard, waits without limit.

        Raises:
            UserError: The shard is unreadable or differs from the index, or the cache folder cannot be written.
            CacheFullError: Shards in use leave no room.
        """
        path = storage.find_local_path(shard.url)
        if path is not None:
            return self.open_checked_local_shard(path, shard)
        with explain_write_errors(self.folder, "set FLYTE_DDP_CACHE to another folder"):
            return self.open_shard_if_cached(shard) or self.download_shard_into_cache(shard)

    def open_checked_local_shard(self, path: Path, shard: Shard) -> BinaryIO:
        """Open a shard on this machine, after a check of size and digest.

        The digest of each version of the file is checked once. A match is recorded in the cache folder. If another
        process is checking the shard, waits without limit.

        Raises:
            UserError: The shard is unreadable, is no plain file, or differs from the index.
        """
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):  # a device, or a pipe, may have no end
                raise UserError(f"shard {shard.url}: is not a regular file; check the address")
            if shard.size not in (-1, status.st_size):
                problem = f"has {status.st_size:,} bytes, but the index lists {shard.size:,}"
                raise UserError(f"shard {shard.url}: {problem}; copy it again, or rebuild the index")
            self.check_local_digest_once(path, status, shard)
            return path.open("rb")
        except OSError as error:
            raise make_unusable_shard_error(shard, error) from None

    def check_local_digest_once(self, path: Path, status: os.stat_result, shard: Shard) -> None:
        """Raise UserError if the file at ``path`` does not have the shard's digest in the index.

        A match is recorded in the cache folder, so each version of the file is hashed once. A shard without a digest in
        the index is accepted. If another process holds the lock of this shard, waits without limit. ``status`` is the
        result of ``path.stat()``.
        """
        kind, wanted = shard.digest
        # ctime is included because copying tools restore mtime but cannot set ctime.
        record, version = (
            self.verification_file(path, wanted),
            f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}",
        )
        if not wanted or is_recorded_as_verified(record, version):
            return
        with ExitStack() as stack:
            with suppress(OSError):  # without a writable cache, each process verifies the shard each time
                stack.enter_context(self.hold_cache_lock(record.name))
            if not is_recorded_as_verified(
                record, version
            ):  # another process may have verified the shard while this one waited
                with path.open("rb") as file:
                    found = hash_file(file, kind)
                if found != wanted:
                    problem = f"its {kind} is {found}, but the index lists {wanted}"
                    fix = "the shard is corrupt or does not match the index; copy it again, or rebuild the index"
                    raise UserError(f"shard {shard.url}: {problem}; {fix}")
                write_verified_version(record, version)

    def verification_file(self, path: Path, digest: str) -> Path:
        """Return the path of the file that records which version of a shard's file has the digest."""
        return self.folder / "verified" / hash_to_file_name(f"{path}\n{digest}")

    def verify_cached_shard(self, path: Path, file: BinaryIO, shard: Shard) -> bool:
        """Return whether an open cached shard has the index's size and digest.

        A match is recorded in the cache folder, so each version of the file is hashed once. The file's position must be
        0, and is 0 afterwards.
        """
        status, (kind, wanted) = os.fstat(file.fileno()), shard.digest
        if shard.size not in (-1, status.st_size):
            return False
        record, version = self.verification_file(path, wanted), describe_cached_version(status)
        if not wanted or is_recorded_as_verified(record, version):
            return True
        found = hash_file(file, kind)
        file.seek(0)
        if found == wanted:
            write_verified_version(record, version)
        return found == wanted

    def open_shard_if_cached(self, shard: Shard) -> BinaryIO | None:
        """Open a cached shard with a shared lock, which prevents eviction until the file is closed.

        Sets the time of last use. Waits if another process is evicting the shard.

        Returns:
            The open file, or None if the shard is missing or was altered.
        """
        path = self.cached_path(shard)
        while True:
            try:
                file = path.open("rb")
            except FileNotFoundError:
                return None
            fcntl.flock(file, fcntl.LOCK_SH)
            is_there = os.fstat(file.fileno()).st_nlink > 0
            if is_there and self.verify_cached_shard(path, file, shard):
                set_access_time_to_now(file.fileno())
                return file
            file.close()
            if is_there:  # else the file was evicted between open and flock, and may have been downloaded again
                return None

    def holds_shard(self, shard: Shard) -> bool:
        """Return whether the shard has a local address or is in the cache, without verification."""
        return storage.find_local_path(shard.url) is not None or self.cached_path(shard).exists()

    def describe_copy(self, shard: Shard) -> str:
        """Return in brackets where a remote shard is cached, for errors about content, or "" for a local shard."""
        return "" if storage.find_local_path(shard.url) is not None else f" (cached in {self.cached_path(shard)})"

    def cached_path(self, shard: Shard) -> Path:
        identity = f"{shard.url}\n{shard.size}\n{shard.digest[1]}"
        return self.folder / f"{hash_to_file_name(identity)}{WHOLE}"

    def download_shard_into_cache(self, shard: Shard) -> BinaryIO:
        """Download a remote shard, and return the open file with a shared lock, which prevents eviction.

        Makes up to 4 tries, with pauses. Waits without limit for another process that downloads the shard. If this
        other process has downloaded the shard, opens the cached shard instead. Replaces an altered copy, and prints a
        message to stderr.

        Raises:
            UserError: The shard cannot be downloaded, differs from the index, or is larger than the cache's limit.
            CacheFullError: Shards in use leave no room.
            OSError: The cache folder cannot be written.
        """
        path = self.cached_path(shard)
        part = path.with_suffix(PARTIAL)
        with self.hold_cache_lock(path.stem):
            if file := self.open_shard_if_cached(shard):
                return file
            if path.exists():
                print_to_stderr(f"shard {shard.url}: its cached copy {path} was altered; downloading it again")
            path.unlink(missing_ok=True)
            part.unlink(missing_ok=True)  # the remains of a killed download
            try:
                with part.open("xb", buffering=0) as target:  # "x" follows no link
                    storage.call_with_retries(shard.url, lambda _: self.download_to_open_file(shard, target))
                    os.fsync(target.fileno())  # else a power cut could leave the final name without the content
            except storage.UnavailableError as failure:
                raise make_unusable_shard_error(shard, failure) from None
            else:
                file = part.open("rb")
                fcntl.flock(file, fcntl.LOCK_SH)  # before the rename, so that nobody can evict the file
                set_access_time_to_now(file.fileno())
                if shard.digest[1]:
                    write_verified_version(
                        self.verification_file(path, shard.digest[1]), describe_cached_version(os.fstat(file.fileno()))
                    )
                with self.hold_cache_lock("room"):  # a process that sums up file sizes must count this file once
                    part.rename(path)
                return file
            finally:
                part.unlink(missing_ok=True)

    def download_to_open_file(self, shard: Shard, target: io.FileIO) -> None:
        """Download a shard, in one try, into an open file. Overwrites the file from byte 0 and may evict other shards.

        Raises:
            AlteredError: Size or digest differs from the index.
            UnavailableError: The shard cannot be read.
            UserError: The shard is larger than the cache's limit.
            CacheFullError: Shards in use leave no room.
            OSError: The file cannot be written.
        """
        kind, wanted = shard.digest
        digest = hashlib.new(kind, usedforsecurity=False)
        if shard.size >= 0:
            self.make_room_and_resize(target, shard.size)
        with storage.open_file(shard.url) as file:
            expected = shard.size if shard.size >= 0 else file.size
            if file.size not in (None, expected):
                raise storage.AlteredError(f"{file.size:,} bytes instead of {expected:,}", transient=True)
            target.seek(0)  # an earlier try may have written a part of the shard
            for chunk in file.chunks:
                end = target.tell() + len(chunk)
                if expected is not None and end > expected:
                    raise storage.AlteredError(f"more than {expected:,} bytes", transient=True)
                if end > os.fstat(target.fileno()).st_size:
                    self.make_room_and_resize(target, expected or end)
                self.write_or_evict(target, chunk)
                digest.update(chunk)
        storage.check_received_length(target.tell(), expected, remote=True)
        if wanted and digest.hexdigest() != wanted:
            raise storage.AlteredError(f"{kind} {digest.hexdigest()} instead of {wanted}", transient=True)
        target.truncate()  # an earlier try may have written more

    def write_or_evict(self, file: io.FileIO, chunk: bytes) -> None:
        """Write all bytes of ``chunk`` to a file. While the disk is full, evict unlocked shards.

        The least recently used shard is evicted first.

        Raises:
            OSError: Writing failed, or the disk is full and no shard can be evicted.
        """
        rest = memoryview(chunk)
        while rest:
            try:
                rest = rest[file.write(rest) :]
            except OSError as error:
                wholes = (path for _, _, path in self.list_files_oldest_first() if path.suffix == WHOLE)
                # any() stops at the first eviction that frees space.
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not any(map(self.evict_file_if_unlocked, wholes)):
                    raise

    def make_room_and_resize(self, file: io.FileIO, size: int) -> None:
        """Evict unlocked shards until ``size`` bytes fit into the cache's limit, then set the file's size.

        Also removes the partial files of killed downloads. Waits for other processes that hold the lock ``room``.

        Raises:
            UserError: The limit is less than ``size``.
            CacheFullError: Shards in use leave no room.
        """
        if self.limit is not None and size > self.limit:
            problem = f"its limit of {self.limit:,} bytes is below the {size:,} bytes of one shard"
            raise UserError(f"shard cache {self.folder}: {problem}; raise FLYTE_DDP_CACHE_BYTES")
        with self.hold_cache_lock("room"):
            self.remove_killed_downloads()
            if self.limit is not None:  # without a limit, listing tens of thousands of files is not needed
                self.evict_oldest_shards(size - os.fstat(file.fileno()).st_size, self.limit)
            os.ftruncate(file.fileno(), size)

    def evict_oldest_shards(self, growth: int, limit: int) -> None:
        """Evict unlocked shards, least recently used first, until ``growth`` more bytes fit into ``limit``.

        The caller must hold the lock ``room``. Shards that were evicted before an error stay evicted.

        Raises:
            CacheFullError: Shards in use leave no room.
        """
        files = self.list_files_oldest_first()
        excess = sum(size for _, size, _ in files) + growth - limit
        for _, _, path in files:
            if path.suffix == WHOLE and excess > 0:
                excess -= self.evict_file_if_unlocked(path)
        if excess > 0:
            problem = f"its limit of {limit:,} bytes is too low by {excess:,} for shards that are read at the same time"
            raise CacheFullError(f"shard cache {self.folder}: {problem}; raise FLYTE_DDP_CACHE_BYTES")

    def remove_killed_downloads(self) -> None:
        """Remove the partial files of downloads that are not in progress.

        A download in progress holds the lock of the shard, and its file is kept.
        """
        for part in self.folder.glob(f"*{PARTIAL}"):
            if CACHED_NAME.fullmatch(part.name):
                with suppress(BlockingIOError), self.hold_cache_lock(part.stem, wait=False):
                    part.unlink(missing_ok=True)

    def list_files_oldest_first(self) -> list[tuple[int, int, Path]]:
        """Return the cached shards and partial files, least recently used first.

        Returns:
            For each file: time of last use (ns), size (bytes) and path.
        """
        files = []
        for path in self.folder.iterdir():
            if CACHED_NAME.fullmatch(path.name):
                with suppress(FileNotFoundError):  # removed by another process
                    status = path.stat()
                    files.append((status.st_atime_ns, status.st_size, path))
        return sorted(files)

    def evict_file_if_unlocked(self, path: Path) -> int:
        """Truncate and remove a cached shard. If the shard is locked, gone or not writable, do nothing.

        Returns:
            The number of freed bytes.
        """
        with suppress(FileNotFoundError, PermissionError), path.open("r+b") as file, suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(file.fileno())
            if status.st_nlink:  # else another process has evicted it
                path.unlink()
                file.truncate(0)  # a reader without a lock may have the file open, which would keep the space in use
                return status.st_size
        return 0

    def hold_cache_lock(self, name: str, *, wait: bool = True) -> AbstractContextManager[BinaryIO]:
        """Hold an exclusive lock of the cache during the block, and yield the open lock file.

        Shards may share a lock, so never wait for a shard's lock while holding another shard's lock.

        Args:
            name: The name of a shard in hex, or ``room`` for the lock of the list of files.
            wait: If True, waits without limit, and deadlocks if this thread already holds the lock. If False, raises
                BlockingIOError if the lock is held, even for another shard.
        """
        name = name if name == "room" else f"{int(name, 16) % LOCKS:04d}"
        return hold_lock(self.folder / "locks", name, wait=wait)


def hash_to_file_name(identity: str) -> str:
    return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def set_access_time_to_now(file: int) -> None:
    """Set the access time of an open file (a descriptor) to now. Ignores failures, as in a read-only cache."""
    with suppress(OSError):  # the cache may be read-only
        # The kernel's clock for file times has steps of milliseconds, so the time is set here.
        os.utime(file, ns=(time.time_ns(), os.fstat(file).st_mtime_ns))


def hash_file(file: Any, kind: str) -> str:
    return hashlib.file_digest(file, partial(hashlib.new, kind, usedforsecurity=False)).hexdigest()


def describe_cached_version(status: os.stat_result) -> str:
    # ctime is not included because set_access_time_to_now() changes it.
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ino}"


def is_recorded_as_verified(record: Path, version: str) -> bool:
    """Return whether the file ``record`` contains ``version``. If the file cannot be read, return False."""
    with suppress(OSError):
        return record.read_bytes() == version.encode()
    return False


def write_verified_version(record: Path, version: str) -> None:
    """Write ``version`` to the file ``record``, in a folder that is created.

    Failures are ignored, as in a read-only cache.
    """
    with suppress(OSError):  # the cache may be read-only
        record.parent.mkdir(exist_ok=True)
        record.write_text(version)


def make_unusable_shard_error(shard: Shard, failure: Exception) -> UserError:
    """Return the UserError for a shard that could not be read or downloaded because of ``failure``.

    If the failure is a transient UnavailableError, but no AlteredError, the error is an UnreachableError, so that the
    run may be tried again.
    """
    reason = getattr(failure, "strerror", None) or str(failure)
    if isinstance(failure, storage.AlteredError):
        return UserError(f"shard {shard.url}: differs from the index: {reason}; copy it again, or rebuild the index")
    message = f"shard {shard.url}: cannot be fetched ({reason}); check the address and the permissions"
    return failure.to_user_error(message) if isinstance(failure, storage.UnavailableError) else UserError(message)
