"""Where tasks put their files: in folders that stay for a local run, in the pod's working directory on a cluster.

Locally Flyte's cache remembers paths, for all clones on a machine together. Each folder therefore has a token, a random
text that is part of the cache key and is renewed when the folder's files are gone: neither a second clone nor a deleted
folder is ever answered with paths that are not there.
"""

import os
import secrets
from pathlib import Path
from typing import TypeVar

from flytekit import FlyteContextManager, current_context
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.errors import UserError
from flyte_ddp.run import Result
from flyte_ddp.settings import runs_folder

FileType = TypeVar("FileType", bound=FlyteFile)


def is_local() -> bool:
    """Whether the task runs on somebody's machine (``pyflyte run``) and not in a pod."""
    state = FlyteContextManager.current_context().execution_state
    return state is None or state.is_local_execution()


def folder_for(name: str) -> Path:
    """The folder called ``name``: under the runs folder locally, else under the pod's working directory."""
    base = runs_folder() if is_local() else Path(current_context().working_directory)
    return base / name


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
        raise UserError(
            f"runs folder {runs_folder()}: {error.strerror}; it must be writable, so mend its permissions or set "
            "FLYTE_DDP_RUNS to another folder"
        ) from None


def without_token(name: str) -> str:
    """The folder's name again."""
    return name.partition("@")[0]


def file(kind: type[FileType], path: Path) -> FileType:
    """An output file: the path itself locally, so that it stays in the run folder; uploaded on a cluster."""
    return kind(str(path), remote_path=False) if is_local() else kind(str(path))


def directory(path: Path) -> FlyteDirectory:
    """An output folder, likewise."""
    return FlyteDirectory(str(path), remote_directory=False) if is_local() else FlyteDirectory(str(path))


def tell(result: Result) -> None:
    """Says, at the end of a local run, what was made and where."""
    if not is_local():
        return
    print(f"\ntest accuracy {result.test_accuracy:.2%} after {len(result.epoch_accuracies)} evaluation(s); made in")
    for path, what in (
        (result.model, "the weights: a bare state_dict"),
        (result.sidecar, "what makes them usable: classes, normalisation, metrics, digests"),
        (result.report, "the report: open it in a browser"),
        (result.metrics, "all metrics, one JSON object a line"),
    ):
        print(f"  {os.path.relpath(path):<60} {what}", flush=True)
