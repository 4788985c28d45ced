"""Where tasks put their files: in folders that stay for a local run, in the pod's working directory on a cluster.

Locally Flyte's cache remembers paths, for all clones on a machine together. Each folder therefore has a token, a random
text that is part of the cache key and is renewed when the folder's files are gone: neither a second clone nor a deleted
folder is ever answered with paths that are not there.
"""

import itertools
import os
import secrets
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
from flyte_ddp.run_folder import settle
from flyte_ddp.run_lock import release, reserve
from flyte_ddp.settings import runs_folder

WORKER_OF = "FLYTE_DDP_WORKER_OF"  # set in Elastic's workers: a local run, or a pod
FOLDER_OF = "FLYTE_DDP_FOLDER_OF"  # likewise: the working directory of the task, of which workers have others
FileType = TypeVar("FileType", bound=FlyteFile)


def is_local() -> bool:
    """Whether the task runs on somebody's machine (``pyflyte run``) and not in a pod."""
    if WORKER_OF in os.environ:  # which Flyte's context does not tell in the workers that Elastic starts
        return os.environ[WORKER_OF] == "local"
    state = FlyteContextManager.current_context().execution_state
    return state is None or state.is_local_execution()


def folder_for(name: str) -> Path:
    """The folder called ``name``: under the runs folder locally, else under the pod's working directory."""
    base = runs_folder() if is_local() else Path(os.environ.get(FOLDER_OF) or current_context().working_directory)
    return base / name


def free_run(name: str) -> str:
    """The run's name; with a number, locally, while another process is at the same run.

    Locally its folder is reserved, unless it holds the answer already: nobody would let go of it.
    """
    if not is_local():
        return name
    for number in itertools.count(1):
        candidate = name if number == 1 else f"{name}-{number}"
        if reserve(folder_for(candidate)):
            break
        print(f"{from_here(folder_for(candidate))}: another process is at this run, so it is made again beside it")
    if settle(folder_for(candidate)) and not asked_anew():
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
    try:
        if not complete or not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_name(f"{path.name}.{os.getpid()}")
            fresh.write_text(secrets.token_hex(8))
            fresh.replace(path)
        return f"{name}@{path.read_text()}"
    except OSError as error:
        raise not_writable(error) from None


def asked_anew() -> bool:
    """Whether a local run is to do all over again: ``pyflyte run --overwrite-cache``, or Flyte's local cache is off."""
    cache = LocalConfig.auto()
    return cache.cache_overwrite or not cache.cache_enabled


def without_token(name: str) -> str:
    """The folder's name again."""
    return name.partition("@")[0]


def file(kind: type[FileType], path: Path) -> FileType:
    """An output file: the path itself locally, so that it stays in the run folder; uploaded on a cluster."""
    return kind(str(path), remote_path=False) if is_local() else kind(str(path))


def directory(path: Path) -> FlyteDirectory:
    """An output folder, likewise."""
    return FlyteDirectory(str(path), remote_directory=False) if is_local() else FlyteDirectory(str(path))


@contextmanager
def new_folder(name: str) -> Iterator[Path]:
    """An empty folder whose name starts with ``name`` and the time; it goes if nothing was put into it."""
    folder = folder_for(f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise not_writable(error) from None
    try:
        yield folder
    finally:
        with suppress(OSError):  # it holds something
            folder.rmdir()


def tell(headline: str, files: Mapping[Path, str]) -> None:
    """Says, at the end of a local run, what was made, all of it in one folder, and where."""
    if is_local():
        [folder] = {path.parent for path in files}
        width = max(len(path.name) for path in files)
        print(f"\n{headline} {from_here(folder)}")
        for path, what in files.items():
            print(f"  {path.name:<{width}}  {what}", flush=True)


def not_writable(error: OSError) -> UserError:
    """The error for a runs folder in which nothing can be made."""
    return UserError(
        f"runs folder {runs_folder()}: {error.strerror}; it must be writable, so fix its permissions or set "
        "FLYTE_DDP_RUNS to another folder"
    )
