"""Download one file and verify its digest."""

import hashlib
from collections.abc import Sequence
from typing import BinaryIO

from flyte_ddp import storage
from flyte_ddp.progress import Progress


def download_verified(
    address: str, name: str, file: BinaryIO, *, algorithm: str, digests: Sequence[str], progress: Progress
) -> str:
    """Download ``address`` once into the emptied ``file``; return its folder; AlteredError for another digest."""
    digest, place = hashlib.new(algorithm, usedforsecurity=False), address.removesuffix(name)
    remote = storage.local_path(address) is None
    file.seek(0)  # an earlier try may have written a part
    file.truncate()
    with storage.open_file(address) as source:
        with progress.track(f"{name} from {place}", source.size, "B") as advance:
            for chunk in source.chunks:
                file.write(chunk)
                digest.update(chunk)
                advance(len(chunk))
        received = file.tell()
    storage.check_length(received, source.size, remote=remote)
    if not digest.hexdigest().startswith(tuple(digests)):
        what = f"{algorithm} {digest.hexdigest()} ({received:,} bytes) instead of {digests[0]}"
        raise storage.AlteredError(what, transient=remote)
    return place.rstrip("/")
