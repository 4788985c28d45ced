"""Shards on this machine's disk, fetched once for all ranks, workers and jobs that want them.

A process that fetches a shard holds a lock. A reader holds a shared lock on the file itself, and only unlocked files
are evicted, least recently used first. A file may stay open without a lock, to be read from again. Eviction empties it,
so that its space is free at once, and the next attempt to lock it fails. The kernel releases the locks of a process
that ends, however it ends. A killed download leaves a partial file, which the next download removes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.files import DISK_FULL
from flyte_ddp.locks import exclusive
from flyte_ddp.shards.index import Shard
from flyte_ddp.shards.locks import stripe
from flyte_ddp.shards.verification import digest_of, failed, open_local, wrong_size
from flyte_ddp.storage.content import check_length

WHOLE, PARTIAL = ".tar", ".part"
OURS = re.compile(rf"[0-9a-f]{{40}}({WHOLE}|{PARTIAL})")  # other files in the folder stay
STEP = 16 << 20  # bytes that are reserved at a time for a shard of unknown size


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
        """The shard as a file that is not evicted until it is closed or unlocked; one on this machine where it is.

        Raises:
            DamagedShardError: a shard on this machine does not have the length or the digest that the index says.
            CacheFullError: there is no room for it as long as others are open.
            UserError: it cannot be had, or is not what the index says.
        """
        path = storage.local_path(shard.url)
        if path is not None:
            return open_local(path, shard, self.folder)
        with unusable_explained(self.folder):
            file = self.kept(shard)
            if file is None:
                return self.fetch(shard)
            mark_used(file.fileno())
            return file

    def kept(self, shard: Shard) -> BinaryIO | None:
        """The shard as it was fetched before; None if it is not there, or not as long as it must be."""
        file = opened(self.path_of(shard))
        if file is not None and wrong_size(file, shard):
            file.close()
            return None
        return file

    def holds(self, shard: Shard) -> bool:
        """Whether the shard is here already."""
        return storage.local_path(shard.url) is not None or self.path_of(shard).exists()

    def heal(self, shard: Shard, *, damaged: bool = False) -> bool:
        """Removes a shard that is no longer what was fetched; False if it is, or if that cannot be known.

        Args:
            damaged: it could not be read, which counts where the index has no digest.
        """
        if storage.local_path(shard.url) is not None or not os.access(self.folder, os.W_OK):
            return False
        with unusable_explained(self.folder), self.locked(shard):
            file = self.kept(shard)
            if file is not None:
                with file:
                    kind, wanted = shard.digest
                    if digest_of(file, kind) == wanted if wanted else not damaged:
                        return False
            self.path_of(shard).unlink(missing_ok=True)  # even if somebody reads it, or has removed it by now
            return True

    def path_of(self, shard: Shard) -> Path:
        """Where the shard is kept: a name that no shard of another address or content has."""
        identity = f"{shard.url}\n{shard.size}\n{shard.digest[1]}"
        return self.folder / f"{hashlib.sha256(identity.encode('utf-8', 'surrogatepass')).hexdigest()[:40]}{WHOLE}"

    def fetch(self, shard: Shard) -> BinaryIO:
        """Downloads and opens the shard, unless another process has done so by then."""
        path = self.path_of(shard)
        part = path.with_suffix(PARTIAL)
        with self.locked(shard):
            if file := self.kept(shard):
                return file
            path.unlink(missing_ok=True)  # a copy that is damaged
            try:
                with part.open("wb", buffering=0) as target:  # what a killed download has left is gone by that
                    if shard.size >= 0:
                        self.reserve(target, shard.size)
                    storage.retried(shard.url, lambda _: self.transfer(shard, target))
                    os.fsync(target.fileno())  # so that a power cut cannot leave the name without the content
                self.fetched[shard.url] += 1
                return self.put_in_place(part, path)
            except storage.UnavailableError as failure:
                raise failed(shard, failure) from None
            finally:
                part.unlink(missing_ok=True)

    def transfer(self, shard: Shard, target: io.FileIO) -> None:
        """One try to download a shard."""
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
                    self.reserve(target, expected or end, STEP)
                self.write(target, chunk)
                digest.update(chunk)
        check_length(target.tell(), expected, remote=True)
        if wanted and digest.hexdigest() != wanted:
            raise storage.AlteredError(f"{kind} {digest.hexdigest()} instead of {wanted}", transient=True)
        target.truncate()

    def write(self, file: io.FileIO, chunk: bytes) -> None:
        """Writes, and makes room where the disk has none."""
        rest = memoryview(chunk)
        while rest:
            try:
                rest = rest[file.write(rest) :]
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self.remove_oldest():
                    raise

    def put_in_place(self, part: Path, path: Path) -> BinaryIO:
        """Gives a whole file its name, and opens it before it can be removed."""
        file = part.open("rb")
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
            mark_used(file.fileno())
            with self.exclusive("room"):  # so that who counts what is there finds it under one name
                part.rename(path)
        except BaseException:
            file.close()
            raise
        return file

    def reserve(self, file: io.FileIO, size: int, more: int = 0) -> None:
        """Makes a file as long as it will be, or more if it may be, and removes others for that if need be."""
        if self.limit is not None and size > self.limit:
            raise UserError(
                f"shard cache {self.folder}: its limit of {self.limit:,} bytes is less than the {size:,} of one shard; "
                "raise FLYTE_DDP_CACHE_BYTES"
            )
        with self.exclusive("room"):
            self.remove_abandoned()
            if self.limit is None:
                size += more
            else:
                size = min(size + more, self.limit)
                self.make_room(size - os.fstat(file.fileno()).st_size, self.limit)
            os.ftruncate(file.fileno(), size)

    def make_room(self, more: int, limit: int) -> None:
        """Evicts what was used least recently, until so many bytes more stay within the limit."""
        found = self.found()
        excess = sum(size for _, size, _ in found) + more - limit
        for _, _, path in found:
            if excess > 0 and path.suffix == WHOLE:
                excess -= self.remove(path)
        if excess > 0:
            raise CacheFullError(
                f"shard cache {self.folder}: its limit of {limit:,} bytes is too low by {excess:,} for the shards "
                "that are read at the same moment; raise FLYTE_DDP_CACHE_BYTES"
            )

    def found(self) -> list[tuple[int, int, Path]]:
        """Time of last use, size and path of what is there, in the order of the first."""
        found = []
        for path in self.folder.iterdir():
            if OURS.fullmatch(path.name):
                with suppress(FileNotFoundError):  # removed meanwhile
                    status = path.stat()
                    found.append((status.st_mtime_ns, status.st_size, path))
        return sorted(found)

    def remove_oldest(self) -> int:
        """Evicts the least recently used of the shards that nobody reads; how many bytes that freed."""
        return next((freed for _, _, path in self.found() if path.suffix == WHOLE and (freed := self.remove(path))), 0)

    def remove(self, path: Path) -> int:
        """Removes a shard unless somebody reads it; how many bytes that freed."""
        with suppress(FileNotFoundError, PermissionError), path.open("r+b") as file, suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if same_file(file, path):
                size = os.fstat(file.fileno()).st_size
                path.unlink()
                file.truncate(0)
                return size
        return 0

    def remove_abandoned(self) -> None:
        """Removes parts of shards whose download was killed."""
        for part in self.folder.glob(f"*{PARTIAL}"):
            if not OURS.fullmatch(part.name):
                continue
            with suppress(BlockingIOError), self.exclusive(stripe(part.stem), wait=False):
                part.unlink(missing_ok=True)

    def exclusive(self, name: str, *, wait: bool = True) -> AbstractContextManager[None]:
        """One of the folder's locks."""
        return exclusive(self.folder / "locks", name, wait=wait)

    def locked(self, shard: Shard) -> AbstractContextManager[None]:
        """The lock for fetching a shard."""
        return self.exclusive(stripe(self.path_of(shard).stem))


def opened(path: Path) -> BinaryIO | None:
    """The file with a shared lock on it, which keeps it from being removed; None if it is not there."""
    while True:
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return None
        fcntl.flock(file, fcntl.LOCK_SH)
        if same_file(file, path):
            return file
        file.close()  # it was removed in between


def mark_used(file: int) -> None:
    """Now is the time of its last use."""
    with suppress(OSError):  # a cache that was filled before and is read-only now will do as well
        os.utime(file, ns=(time.time_ns(),) * 2)  # the system's own clock for files goes in larger steps


def same_file(file: BinaryIO, path: Path) -> bool:
    """Whether the open file is still the one at the path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def unusable_explained(folder: Path) -> Iterator[None]:
    """Turns the errors of a folder that is full or cannot be written to into the user's."""
    try:
        yield
    except OSError as error:
        fix = "free some space" if error.errno in DISK_FULL else "make it writable"
        raise UserError(
            f"shard cache {folder}: {error.strerror}; {fix}, or set FLYTE_DDP_CACHE to another folder"
        ) from error
