"""Open shards that lie on this machine, and compare them with their index."""

import hashlib
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.locks import hold_lock
from flyte_ddp.shards.index import Shard
from flyte_ddp.shards.tar import DamagedShardError

LOCKS = 1024  # number of lock files; two shards with the same lock are fetched one after the other


def lock_name(digest: str) -> str:
    """Return the name of the lock file of a shard.

    Args:
        digest: hexadecimal digits that identify the shard, such as its file's name in the cache.
    """
    return f"{int(digest, 16) % LOCKS:04d}"


def open_local_shard(path: Path, shard: Shard, cache: Path) -> BinaryIO:
    """Open a shard that lies on this machine, compare it with the index, and return the open file.

    Reads the whole file for the digest, unless an earlier call has verified it.

    Args:
        path: the shard's path.
        shard: the shard's entry in the index; a size or digest that the entry lacks is not compared.
        cache: folder of the cache, where a verified shard is marked by an empty file.

    Raises:
        DamagedShardError: the size or the digest differs from the index.
        UserError: the path is no regular file, or cannot be read.
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
            raise unusable_shard_error(shard, error) from None
        on_failure.pop_all()
    return file


def verify_digest_once(file: BinaryIO, path: Path, shard: Shard, cache: Path) -> None:
    """Verify the digest of an open shard, unless a file in the cache marks that this was done; then write that mark.

    The mark counts only while the shard's path, size and times stay the same. Other processes that open the shard wait
    for the result. If the cache cannot be written, each call verifies.

    Raises:
        DamagedShardError: the digest differs from the index.
    """
    kind, wanted = shard.digest
    status = os.fstat(file.fileno())
    # ctime too: copying tools set mtime to that of the original, but cannot set ctime.
    identity = f"{path}\n{status.st_size}\n{status.st_mtime_ns}\n{status.st_ctime_ns}\n{wanted}"
    mark = cache / "verified" / hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:40]
    if not wanted or mark.exists():
        return
    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(hold_lock(cache / "locks", lock_name(mark.name)))
            mark.parent.mkdir(exist_ok=True)
        if not mark.exists():
            if (found := hash_open_file(file, kind)) != wanted:
                raise DamagedShardError(
                    f"shard {shard.url}: its {kind} is {found} and not the {wanted} that the index says, so it is "
                    "damaged, or another one; copy it again, or renew the index"
                )
            file.seek(0)
            with suppress(OSError):
                mark.touch()


def hash_open_file(file: BinaryIO, kind: str) -> str:
    """Read an open file from its position to its end, and return the digest (hex); ``kind`` is "md5" or "sha256"."""
    return hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()  # type: ignore[arg-type]


def has_wrong_size(file: BinaryIO, shard: Shard) -> bool:
    """Return whether an open file has another size than the index says; False if the index has no size."""
    return shard.size >= 0 and os.fstat(file.fileno()).st_size != shard.size


def unusable_shard_error(shard: Shard, failure: Exception) -> UserError:
    """Return the UserError about a shard that cannot be read or fetched because of an exception."""
    reason = getattr(failure, "strerror", None) or str(failure)
    if isinstance(failure, storage.AlteredError):
        return UserError(f"shard {shard.url}: differs from the index: {reason}; copy it again, or renew the index")
    message = f"shard {shard.url}: cannot be fetched ({reason}); check the address, and that it can be read"
    return failure.to_user_error(message) if isinstance(failure, storage.UnavailableError) else UserError(message)
