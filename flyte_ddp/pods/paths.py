"""Where tasks put their files: in folders that stay for a local run, in the pod's own folder on a cluster.

Locally Flyte's cache remembers paths, for all clones on a machine together. Each folder therefore has a token, a random
text that is part of the cache key and is renewed when the folder's files are gone: neither a second clone nor a deleted
folder is ever answered with paths that are not there.
"""

import itertools
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from flyte_ddp.errors import UserError, from_here
from flyte_ddp.files import atomic_write
from flyte_ddp.pods.environment import REGISTRY_VARIABLE
from flyte_ddp.pods.platforms import Platform
from flyte_ddp.runs.run_folder import settle
from flyte_ddp.runs.run_lock import release, reserve
from flyte_ddp.settings import read_text, runs_folder


def folder_for(platform: Platform, name: str) -> Path:
    """Return the folder of a name, with or without a token: in the runs folder locally, else in the pod's folder."""
    base = runs_folder() if platform.is_local() else platform.pod_folder()
    return base / name.partition("@")[0]


def registry_address(platform: Platform) -> str:
    """Return the address of the registry of models.

    Raises:
        UserError: a pod was given no address that all pods reach.
    """
    address = read_text(REGISTRY_VARIABLE)
    if platform.is_local():
        return address or str(runs_folder() / "registry")
    if "://" not in address:
        raise UserError(
            f"{REGISTRY_VARIABLE}={address!r}: must be an address that all pods reach, such as s3://bucket/models; set "
            "it and register again"
        )
    return address


def reserve_run(platform: Platform, name: str) -> str:
    """Reserve a local run's folder for this thread, and return the run's name; in a pod return the name only.

    While another process trains the same run, a number is added to the name. A folder that holds the result already is
    not kept reserved, unless the run is trained again: no training would release it.
    """
    if not platform.is_local():
        return name
    for number in itertools.count(1):
        candidate = name if number == 1 else f"{name}-{number}"
        folder = folder_for(platform, candidate)
        if reserve(folder):
            break
        print(f"{from_here(folder)}: another process is at this run; this one gets a folder of its own")
    if settle(folder) and not platform.is_retraining_requested():
        release(folder)
    return candidate


def with_token(platform: Platform, name: str, *, complete: bool) -> str:
    """Return a name with its folder's token, which is written if there is none; in a pod return the name only.

    Args:
        platform: What runs this task.
        name: Name of a folder.
        complete: Whether all files that a cached result would point to are there; if not, the token is replaced.

    Raises:
        UserError: the runs folder cannot be written to.
    """
    if not platform.is_local():
        return name
    path = runs_folder() / ".tokens" / name.replace("/", "-")
    with must_be_writable():
        if not complete or not path.exists():
            with atomic_write(path, durable=False) as file:
                file.write(secrets.token_hex(8).encode())
        return f"{name}@{path.read_text()}"


@contextmanager
def new_folder(platform: Platform, name: str) -> Iterator[Path]:
    """Make a folder whose name is ``name``, the time and random digits, and remove it at the end if it is empty.

    Raises:
        UserError: it cannot be made.
    """
    folder = folder_for(platform, f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}")
    with must_be_writable():
        folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        with suppress(OSError):  # it holds something
            folder.rmdir()


def print_files(platform: Platform, headline: str, files: Mapping[Path, str]) -> None:
    """Print which files a local run has made in a folder, and what each holds; print nothing in a pod."""
    if platform.is_local():
        [folder] = {path.parent for path in files}
        width = max(len(path.name) for path in files)
        print(f"\n{headline} {from_here(folder)}")
        for path, what in files.items():
            print(f"  {path.name:<{width}}  {what}", flush=True)


@contextmanager
def must_be_writable() -> Iterator[None]:
    """Turn an OSError in the runs folder into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"runs folder {runs_folder()}: {error.strerror}; it must be writable, so fix its permissions or set "
            "FLYTE_DDP_RUNS to another folder"
        ) from None
