"""Compares shards with what their index says of them; those on this machine, which nobody fetched, once."""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.locks import exclusive
from flyte_ddp.shards.index import Shard
from flyte_ddp.shards.locks import stripe
from flyte_ddp.shards.tar import DamagedShardError


def open_local(path: Path, shard: Shard, cache: Path) -> BinaryIO:
    """Opens a shard on this machine that is what its index says, as far as that says it.

    Args:
        path: where it is.
        cache: a folder that has marks of what was compared, for all that use it.

    Raises:
        DamagedShardError: it has another length or digest.
        UserError: it cannot be read.
    """
    with ExitStack() as on_failure:
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # a device, or a pipe, may have no end
                raise UserError(f"shard {shard.url}: is no plain file; check the address")
            file = on_failure.enter_context(path.open("rb"))
            if wrong_size(file, shard):
                raise DamagedShardError(
                    f"shard {shard.url}: has {os.fstat(file.fileno()).st_size:,} bytes and not the {shard.size:,} that "
                    "the index says; copy it again, or renew the index"
                )
            compare_once(file, path, shard, cache)
        except OSError as error:
            raise failed(shard, error) from None
        on_failure.pop_all()
    return file


def compare_once(file: BinaryIO, path: Path, shard: Shard, cache: Path) -> None:
    """Compares a shard with its digest in the index, as long as its size and times stay only once.

    What was compared is remembered by empty files in the cache, if that can be written to.
    """
    kind, wanted = shard.digest
    status = os.fstat(file.fileno())
    # With the time of the last change of any kind, which copying tools do not set as they do the other one.
    known_by = f"{path}\n{status.st_size}\n{status.st_mtime_ns}\n{status.st_ctime_ns}\n{wanted}"
    marked = cache / "verified" / hashlib.sha256(known_by.encode("utf-8", "surrogatepass")).hexdigest()[:40]
    if not wanted or marked.exists():
        return
    with ExitStack() as stack:
        with suppress(OSError):
            # Others wait, and then need not do it again.
            stack.enter_context(exclusive(cache / "locks", stripe(marked.name)))
            marked.parent.mkdir(exist_ok=True)
        if not marked.exists():
            if (found := digest_of(file, kind)) != wanted:
                raise DamagedShardError(
                    f"shard {shard.url}: its {kind} is {found} and not the {wanted} that the index says, so it is "
                    "damaged, or another one; copy it again, or renew the index"
                )
            file.seek(0)
            with suppress(OSError):
                marked.touch()


def digest_of(file: BinaryIO, kind: str) -> str:
    """The digest (hex) of a file."""
    new = partial(hashlib.new, kind, usedforsecurity=False)
    return hashlib.file_digest(file, new).hexdigest()  # type: ignore[arg-type]  # BinaryIO has readinto


def wrong_size(file: BinaryIO, shard: Shard) -> bool:
    """Whether the file is not as long as the index says."""
    return shard.size >= 0 and os.fstat(file.fileno()).st_size != shard.size


def failed(shard: Shard, failure: Exception) -> UserError:
    """The error for a shard that cannot be had."""
    reason = getattr(failure, "strerror", None) or str(failure)
    if isinstance(failure, storage.AlteredError):
        return UserError(f"shard {shard.url}: is not the one in the index: {reason}; copy it again, or renew the index")
    message = f"shard {shard.url}: cannot be fetched ({reason}); check the address, and that it can be read"
    return failure.explained(message) if isinstance(failure, storage.UnavailableError) else UserError(message)
