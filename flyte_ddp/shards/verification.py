"""Compares shards on this machine, which nobody fetched, with what their index says of them."""

import hashlib
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.locks import exclusive
from flyte_ddp.shards.index import Shard
from flyte_ddp.shards.tar import DamagedShardError

LOCKS = 1024  # files to lock; shards that share one are fetched one after the other


def lock_name(digest: str) -> str:
    """Return the name of the lock that goes with a shard whose name in the cache is these hexadecimal digits."""
    return f"{int(digest, 16) % LOCKS:04d}"


def open_local(path: Path, shard: Shard, cache: Path) -> BinaryIO:
    """Open a shard on this machine, at ``path``, and return its file.

    Raises DamagedShardError if its length or digest is not the index's, as far as the index has them, and UserError if
    it cannot be read. ``cache`` is a folder for marks of what was compared, for all that use it.
    """
    with ExitStack() as on_failure:
        try:
            if path.exists() and not path.is_file():  # a device, or a pipe, may have no end
                raise UserError(f"shard {shard.url}: is no plain file; check the address")
            file = on_failure.enter_context(path.open("rb"))
            if has_wrong_size(file, shard):
                raise DamagedShardError(
                    f"shard {shard.url}: has {os.fstat(file.fileno()).st_size:,} bytes and not the {shard.size:,} that "
                    "the index says; copy it again, or renew the index"
                )
            verify_digest_once(file, path, shard, cache)
        except OSError as error:
            raise explain_failure(shard, error) from None
        on_failure.pop_all()
    return file


def verify_digest_once(file: BinaryIO, path: Path, shard: Shard, cache: Path) -> None:
    """Verify the shard's digest, once as long as its size and times stay the same; other processes wait meanwhile.

    An empty file in the cache's folder marks what was verified; where none can be written, each call verifies. Raises
    DamagedShardError for another digest.
    """
    kind, wanted = shard.digest
    status = os.fstat(file.fileno())
    # With the time of the last change of any kind, which copying tools do not set as they do the other one.
    known_by = f"{path}\n{status.st_size}\n{status.st_mtime_ns}\n{status.st_ctime_ns}\n{wanted}"
    mark = cache / "verified" / hashlib.sha256(known_by.encode("utf-8", "surrogatepass")).hexdigest()[:40]
    if not wanted or mark.exists():
        return
    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(exclusive(cache / "locks", lock_name(mark.name)))
            mark.parent.mkdir(exist_ok=True)
        if not mark.exists():
            if (found := file_digest(file, kind)) != wanted:
                raise DamagedShardError(
                    f"shard {shard.url}: its {kind} is {found} and not the {wanted} that the index says, so it is "
                    "damaged, or another one; copy it again, or renew the index"
                )
            file.seek(0)
            with suppress(OSError):
                mark.touch()


def file_digest(file: BinaryIO, kind: str) -> str:
    """Read an open file to its end, and return its MD5 or SHA-256 (hex)."""
    return hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()  # type: ignore[arg-type]


def has_wrong_size(file: BinaryIO, shard: Shard) -> bool:
    """Return whether the file is not as long as the index says."""
    return shard.size >= 0 and os.fstat(file.fileno()).st_size != shard.size


def explain_failure(shard: Shard, failure: Exception) -> UserError:
    """Return the error for a shard that cannot be had because of an exception."""
    reason = getattr(failure, "strerror", None) or str(failure)
    if isinstance(failure, storage.AlteredError):
        return UserError(f"shard {shard.url}: is not the one in the index: {reason}; copy it again, or renew the index")
    message = f"shard {shard.url}: cannot be fetched ({reason}); check the address, and that it can be read"
    return failure.explained(message) if isinstance(failure, storage.UnavailableError) else UserError(message)
