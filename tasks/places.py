"""Where tasks put their files: in folders that stay for a local run, in the pod's working directory on a cluster.

Locally Flyte's cache remembers paths, for all clones on a machine together. Each folder therefore has a token, a random
text that is part of the cache key and is renewed when the folder's files are gone: neither a second clone nor a deleted
folder is ever answered with paths that are not there.
"""

import getpass
import itertools
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from flytekit import FlyteContextManager, current_context
from flytekit.configuration import LocalConfig
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.errors import UserError, from_here
from flyte_ddp.runs.run_folder import settle
from flyte_ddp.runs.run_lock import release, reserve
from flyte_ddp.settings import runs_folder
from tasks.pods import REGISTRY_VARIABLE

# Set in Elastic's workers: the working directory of the pod's task, as workers have others; empty in a local run.
POD_FOLDER = "FLYTE_DDP_POD_FOLDER"
FileType = TypeVar("FileType", bound=FlyteFile)


def is_local() -> bool:
    """Whether the task runs on somebody's machine (``pyflyte run``) and not in a pod."""
    if POD_FOLDER in os.environ:  # Flyte's context does not say it in the workers that Elastic starts
        return not os.environ[POD_FOLDER]
    state = FlyteContextManager.current_context().execution_state
    return state is None or state.is_local_execution()


def folder_for(name: str) -> Path:
    """The folder called ``name``, with or without its token: under the runs folder locally, else under the pod's."""
    base = runs_folder() if is_local() else Path(os.environ.get(POD_FOLDER) or current_context().working_directory)
    return base / name.partition("@")[0]


def registry() -> str:
    """The address of the registries of models.

    Raises:
        UserError: a pod was given none that lasts longer than itself.
    """
    address = os.environ.get(REGISTRY_VARIABLE, "")
    if is_local():
        return address or str(runs_folder() / "registry")
    if "://" not in address:
        raise UserError(
            f"{REGISTRY_VARIABLE}={address!r}: must be an address that all pods reach, such as s3://bucket/models; set "
            "it and register again"
        )
    return address


def who() -> str:
    """Who does something: the Flyte execution, which knows who launched it; locally the user."""
    if is_local():
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # in a container, of a user without a name
            user = str(os.getuid())
        return f"{user}@{socket.gethostname()}"
    execution = current_context().execution_id
    return f"{execution.project}/{execution.domain}/{execution.name}"


def free_run(name: str) -> str:
    """The run's name; locally with a number, while another process trains the same run.

    Locally its folder is reserved, unless it holds the result already: then no training would release it.
    """
    if not is_local():
        return name
    for number in itertools.count(1):
        candidate = name if number == 1 else f"{name}-{number}"
        if reserve(folder_for(candidate)):
            break
        print(f"{from_here(folder_for(candidate))}: another process is at this run; this one gets a folder of its own")
    if settle(folder_for(candidate)) and not asked_to_retrain():
        release(folder_for(candidate))
    return candidate


def with_token(name: str, *, complete: bool) -> str:
    """``name`` with the token of its folder, locally; the bare name on a cluster, where files are in a blob store.

    Args:
        complete: whether all files that a cached result would point to are there.
    """
    if not is_local():
        return name
    path = runs_folder() / ".tokens" / name.replace("/", "-")
    with must_be_writable():
        if not complete or not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_name(f"{path.name}.{os.getpid()}")
            fresh.write_text(secrets.token_hex(8))
            fresh.replace(path)
        return f"{name}@{path.read_text()}"


def asked_to_retrain() -> bool:
    """Whether a local run always retrains: by ``pyflyte run --overwrite-cache``, or as Flyte's local cache is off."""
    cache = LocalConfig.auto()
    return cache.cache_overwrite or not cache.cache_enabled


def file(kind: type[FileType], path: Path) -> FileType:
    """An output file: the path itself locally, so that it stays in the run folder; uploaded on a cluster."""
    return kind(str(path), remote_path=False) if is_local() else kind(str(path))


def directory(path: Path) -> FlyteDirectory:
    """An output folder, likewise."""
    return FlyteDirectory(str(path), remote_directory=False) if is_local() else FlyteDirectory(str(path))


@contextmanager
def new_folder(name: str) -> Iterator[Path]:
    """An empty folder whose name starts with ``name`` and the time; it is removed if it stays empty."""
    folder = folder_for(f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}")
    with must_be_writable():
        folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        with suppress(OSError):  # it holds something
            folder.rmdir()


def tell(headline: str, files: Mapping[Path, str]) -> None:
    """Prints, at the end of a local run, which files were made, and in which folder."""
    if is_local():
        [folder] = {path.parent for path in files}
        width = max(len(path.name) for path in files)
        print(f"\n{headline} {from_here(folder)}")
        for path, what in files.items():
            print(f"  {path.name:<{width}}  {what}", flush=True)


@contextmanager
def must_be_writable() -> Iterator[None]:
    """Turns an OSError in the runs folder into the user's error."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"runs folder {runs_folder()}: {error.strerror}; it must be writable, so fix its permissions or set "
            "FLYTE_DDP_RUNS to another folder"
        ) from None
