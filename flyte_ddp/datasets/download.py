"""Getting one file: verified, atomic, and with retries where another try may help."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flyte_ddp.files import sync
from flyte_ddp.progress import Progress
from flyte_ddp.storage import AlteredError, local_path, open_file
from flyte_ddp.storage.content import check_length
from flyte_ddp.storage.retries import with_retries


@dataclass(frozen=True)
class Expected:
    """Digests (hex) of which a file must have one: two compressions of the same content are two files."""

    algorithm: str  # md5 or sha256
    digests: tuple[str, ...]


def download(name: str, addresses: Sequence[str], expected: Expected, folder: Path, progress: Progress) -> str:
    """Puts the file ``name`` into ``folder``, from the first of ``addresses`` that has it, and returns that address.

    Raises:
        AllFailedError: the file could not be had; nothing of it is left in the folder.
    """

    def get(address: str) -> str:
        transfer(name, address, expected, folder, progress)
        return address

    return with_retries(name, addresses, get, progress.note)


def transfer(name: str, address: str, expected: Expected, folder: Path, progress: Progress) -> None:
    """One try: under a temporary name until its size and digest have been checked."""
    remote = local_path(address) is None
    digest = hashlib.new(expected.algorithm, usedforsecurity=False)
    descriptor, path = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
    temporary = Path(path)
    try:
        with os.fdopen(descriptor, "wb") as file, open_file(address) as found:
            with progress.track(f"{name} from {address.removesuffix(name)}", found.size, "B") as advance:
                for chunk in found.chunks:
                    file.write(chunk)
                    digest.update(chunk)
                    advance(len(chunk))
            check_length(file.tell(), found.size, remote=remote)
            check_digest(digest.hexdigest(), file.tell(), expected, remote=remote)
            sync(file)
        temporary.replace(folder / name)
    except BaseException:
        temporary.unlink()
        raise


def check_digest(digest: str, received: int, expected: Expected, *, remote: bool) -> None:
    """Raises AlteredError for content that is not the expected one."""
    if digest not in expected.digests:
        raise AlteredError(
            f"{expected.algorithm} {digest} ({received:,} bytes) instead of {expected.digests[0]}", transient=remote
        )
