"""Shards on this machine's disk, fetched once for all ranks, workers and jobs that want them.

Who fetches a shard holds a lock; who reads one holds a shared lock on the file itself, and only files on which nobody
does are removed to make room. The kernel gives all of these back when a process ends, however it ends, so there is
nothing to clean up after a kill but the part of a file, which the next one to need room or that shard removes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.files import DISK_FULL
from flyte_ddp.shards.index import Shard
from flyte_ddp.shards.tar import DamagedShardError
from flyte_ddp.storage.content import CHUNK_BYTES, check_length

WHOLE, PARTIAL = ".tar", ".part"
LOCKS = 1024  # files to lock; shards that share one are fetched one after the other


@dataclass(frozen=True)
class ShardCache:
    """A folder of fetched shards.

    Args:
        folder: made if it is not there.
        limit: most bytes that it may hold; None sets no limit but the disk's.
        note: is told what goes wrong and is tried again.
    """

    folder: Path
    limit: int | None = None
    note: Callable[[str], object] = field(default=lambda _: None, compare=False)

    def open(self, shard: Shard) -> BinaryIO:
        """The shard as a file that nobody removes until it is closed; a shard on this machine is opened where it is.

        Raises:
            DamagedShardError: it is not what the index says, also when fetched again.
            UserError: it cannot be had, or there is no room for it.
        """
        path = storage.local_path(shard.url)
        if path is not None:
            return open_in_place(path, shard)
        path = self.path_of(shard)
        with unusable_explained(self.folder):
            while True:
                file = opened(path)
                if file is None:
                    self.fetch(shard)
                elif wrong_size(file, shard):
                    file.close()
                    self.remove(path)
                else:
                    os.utime(file.fileno())  # used last
                    return file

    def holds(self, shard: Shard) -> bool:
        """Whether the shard is here already."""
        return storage.local_path(shard.url) is not None or self.path_of(shard).exists()

    def heal(self, shard: Shard) -> bool:
        """Removes a shard that is no longer what was fetched; False if it is, or if that cannot be known."""
        if storage.local_path(shard.url) is not None or not (shard.sha256 or shard.md5):
            return False
        with unusable_explained(self.folder), self.locked(shard):
            file = opened(self.path_of(shard))
            if file is None:
                return True  # somebody else has
            with file:
                digest = new_digest(shard)
                while piece := file.read(CHUNK_BYTES):
                    digest.update(piece)
            if digest.hexdigest() == (shard.sha256 or shard.md5):
                return False
            self.note(f"{shard.url}: the copy in {self.folder} was damaged; it is fetched again")
            self.path_of(shard).unlink(missing_ok=True)
            return True

    def path_of(self, shard: Shard) -> Path:
        """Where the shard is kept: a name that no shard of another address or content has."""
        identity = f"{shard.url}\n{shard.size}\n{shard.sha256 or shard.md5}"
        return self.folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:40]}{WHOLE}"

    def fetch(self, shard: Shard) -> None:
        """Downloads the shard, unless another process has done so by then."""
        path = self.path_of(shard)
        with self.locked(shard):
            if path.exists():
                return
            part = path.with_suffix(PARTIAL)
            try:
                storage.with_retries(shard.url, [shard.url], lambda _: self.transfer(shard, part), self.note)
                part.rename(path)
            except storage.AllFailedError as error:
                raise failed(shard, next(iter(error.failures.values()))) from None
            finally:
                part.unlink(missing_ok=True)

    def transfer(self, shard: Shard, part: Path) -> None:
        """One try to download a shard."""
        digest = new_digest(shard)
        with storage.open_file(shard.url) as (announced, chunks):
            expected = shard.size if shard.size >= 0 else announced
            with self.room_for(part, expected or 0) as file:
                received = 0
                for chunk in chunks:
                    self.write(file, chunk)
                    digest.update(chunk)
                    received += len(chunk)
                os.ftruncate(file.fileno(), received)
        check_length(received, expected, remote=True)
        wanted = shard.sha256 or shard.md5
        if wanted and digest.hexdigest() != wanted:
            raise storage.AlteredError(f"{digest.name} {digest.hexdigest()} instead of {wanted}", transient=True)

    def write(self, file: BinaryIO, chunk: bytes) -> None:
        """Writes, and makes room where the disk has none."""
        rest = memoryview(chunk)
        while rest:
            try:
                rest = rest[os.write(file.fileno(), rest) :]
            except OSError as error:  # noqa: PERF203
                if error.errno not in DISK_FULL or not self.remove_oldest():
                    raise

    @contextmanager
    def room_for(self, part: Path, size: int) -> Iterator[BinaryIO]:
        """A new file that takes up its room from the start, for which others have been removed if need be."""
        with self.exclusive("room"):
            part.unlink(missing_ok=True)
            self.remove_abandoned()
            if self.limit is not None:
                self.make_room(size, self.limit)
            file = part.open("wb")
            os.ftruncate(file.fileno(), size)
        with file:
            yield file

    def make_room(self, size: int, limit: int) -> None:
        """Removes what was not used for longest until so many bytes more stay within the limit."""
        files = [path.stat() for path in self.folder.iterdir() if path.suffix in (WHOLE, PARTIAL)]
        excess = sum(found.st_size for found in files) + size - limit
        while excess > 0:
            removed = self.remove_oldest()
            if not removed:
                raise UserError(
                    f"shard cache {self.folder}: its limit of {limit:,} bytes is too low by {excess:,} for the shards "
                    "that are read at the same time; raise FLYTE_DDP_CACHE_BYTES, or lower shuffle_shards"
                )
            excess -= removed

    def remove_oldest(self) -> int:
        """Removes the shard that was not used for longest of those that nobody reads; how many bytes that freed."""
        found = []
        for path in self.folder.glob(f"*{WHOLE}"):
            with suppress(FileNotFoundError):
                found.append((path.stat().st_mtime_ns, path))
        for _, path in sorted(found):
            if size := self.remove(path):
                return size
        return 0

    def remove(self, path: Path) -> int:
        """Removes a shard unless somebody reads it; how many bytes that freed."""
        with suppress(FileNotFoundError), path.open("rb") as file, suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if same_file(file, path):
                path.unlink()
                return os.fstat(file.fileno()).st_size
        return 0

    def remove_abandoned(self) -> None:
        """Removes parts of shards whose download was killed."""
        for part in self.folder.glob(f"*{PARTIAL}"):
            with suppress(BlockingIOError), self.exclusive(stripe(part.stem), wait=False):
                part.unlink(missing_ok=True)

    def locked(self, shard: Shard) -> AbstractContextManager[None]:
        """The lock for fetching a shard."""
        return self.exclusive(stripe(self.path_of(shard).stem))

    @contextmanager
    def exclusive(self, name: str, *, wait: bool = True) -> Iterator[None]:
        """Holds a lock that one thread of one process can hold at a time."""
        locks = self.folder / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / name).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            yield


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


def open_in_place(path: Path, shard: Shard) -> BinaryIO:
    """A shard that is on this machine."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise failed(shard, error) from None
    if wrong_size(file, shard):
        found = os.fstat(file.fileno()).st_size
        file.close()
        raise DamagedShardError(
            f"shard {shard.url}: has {found:,} bytes and not the {shard.size:,} that the index says; "
            "copy it again, or renew the index"
        )
    return file


def wrong_size(file: BinaryIO, shard: Shard) -> bool:
    """Whether the file is not as long as the index says."""
    return shard.size >= 0 and os.fstat(file.fileno()).st_size != shard.size


def same_file(file: BinaryIO, path: Path) -> bool:
    """Whether the open file is still the one at the path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def stripe(name: str) -> str:
    """The lock that goes with a shard's name."""
    return f"{int(name, 16) % LOCKS:04d}"


def new_digest(shard: Shard) -> hashlib._Hash:
    """For the digest that the index has of the shard."""
    return hashlib.sha256() if shard.sha256 or not shard.md5 else hashlib.md5(usedforsecurity=False)


def failed(shard: Shard, failure: Exception) -> UserError:
    """The error for a shard that cannot be had."""
    reason = getattr(failure, "strerror", None) or str(failure)
    if isinstance(failure, storage.AlteredError):
        return DamagedShardError(
            f"shard {shard.url}: is not the one in the index: {reason}; copy it again, or renew the index"
        )
    return UserError(f"shard {shard.url}: cannot be fetched ({reason}); check the address, and that it can be read")


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
