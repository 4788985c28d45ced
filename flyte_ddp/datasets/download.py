"""Getting one file: verified, atomic, and with retries where another try may help."""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from flyte_ddp import storage
from flyte_ddp.datasets.progress import Progress
from flyte_ddp.storage import UnavailableError, local_path, open_file
from flyte_ddp.storage.content import check_length

ATTEMPTS = 4
FIRST_DELAY = 1.0  # seconds; doubled each time

Result = TypeVar("Result")


class AlteredError(UnavailableError):
    """The file that arrived does not have an expected digest."""


class AllFailedError(Exception):
    """No place had the file; ``failures`` has the last failure of each."""

    def __init__(self, failures: dict[str, UnavailableError]) -> None:
        super().__init__("; ".join(f"{address}: {error}" for address, error in failures.items()))
        self.failures = failures


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

    return with_retries(name, addresses, get, progress)


def with_retries(name: str, addresses: Sequence[str], action: Callable[[str], Result], progress: Progress) -> Result:
    """The result of ``action`` for the first address for which it succeeds.

    A round tries all addresses in order, and between rounds there is a pause that doubles, shortened at random so that
    many pods don't come back together. Left out of later rounds are addresses that failed for good, or whose file was
    altered twice (once may have been the network).
    """
    remaining = list(addresses)
    failures: dict[str, UnavailableError] = {}
    for attempt in range(ATTEMPTS):
        for address in tuple(remaining):
            try:
                return action(address)
            except UnavailableError as error:  # noqa: PERF203
                altered_again = isinstance(error, AlteredError) and isinstance(failures.get(address), AlteredError)
                failures[address] = error
                if not error.transient or altered_again:
                    remaining.remove(address)
        if not remaining or attempt + 1 == ATTEMPTS:
            break
        delay = FIRST_DELAY * 2**attempt * random.uniform(0.5, 1.0)
        progress.note(f"{name}: {failures[remaining[0]]}; next try in {delay:.1f} s")
        time.sleep(delay)
    raise AllFailedError(failures)


def transfer(name: str, address: str, expected: Expected, folder: Path, progress: Progress) -> None:
    """One try: under a temporary name until its size and digest have been checked."""
    remote = local_path(address) is None
    digest = hashlib.new(expected.algorithm, usedforsecurity=False)
    descriptor, path = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
    temporary = Path(path)
    try:
        with os.fdopen(descriptor, "wb") as file, open_file(address) as (size, chunks):
            with progress.track(f"{name} from {address.removesuffix(name)}", size, "B") as advance:
                for chunk in chunks:
                    file.write(chunk)
                    digest.update(chunk)
                    advance(len(chunk))
            check_length(file.tell(), size, remote=remote)
            check_digest(digest.hexdigest(), file.tell(), expected, remote=remote)
            file.flush()
            os.fsync(file.fileno())
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


def read_small(address: str, progress: Progress) -> bytes:
    """A small file's content, with retries.

    Raises:
        AllFailedError: it could not be had.
    """
    return with_retries(address.rpartition("/")[2], [address], storage.read, progress)
