"""Folders of tasks: below the runs folder locally, and below the pod's folder on a cluster.

Locally, Flyte's cache stores paths, for all clones of a repository on a machine. Therefore a random token of each
folder is part of the cache key. The token is replaced when files are missing, so that no cached path leads to a missing
file.
"""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from flyte_ddp.core.errors import UserError, shorten_path
from flyte_ddp.core.files import atomic_write
from flyte_ddp.core.settings import read_text_variable, runs_folder
from flyte_ddp.pods.environment import REGISTRY_VARIABLE
from flyte_ddp.pods.outcomes import print_outcome
from flyte_ddp.pods.platforms import get_pod_folder, is_in_pod


def resolve_folder(name: str) -> Path:
    """Return the path of the folder ``name`` in the runs folder, or in a pod in the pod's folder.

    A token after an @ in the name is ignored.
    """
    return (get_pod_folder() if is_in_pod() else runs_folder()) / name.partition("@")[0]


def read_registry_address() -> str:
    """Return the address of the registry of models: FLYTE_DDP_REGISTRY, or locally a folder in the runs folder.

    Raises:
        UserError: In a pod, the address is not remote.
    """
    address = read_text_variable(REGISTRY_VARIABLE)
    if not is_in_pod():
        return address or str(runs_folder() / "registry")
    if "://" not in address:
        raise UserError(
            f"{REGISTRY_VARIABLE}={address!r}: must be an address that all pods can reach, such as s3://bucket/models; "
            "set it and register again"
        )
    return address


def complete_interrupted_move(name: str) -> bool:
    """Move the files of a complete local run into the run's folder, if an earlier move was interrupted.

    Returns whether the run has a result now. In a pod, does nothing and returns False.

    Raises:
        UserError: The run is still active.
    """
    from flyte_ddp.core.runs.run_folder import lock_run_folder, move_complete_run_into_place

    if is_in_pod():
        return False
    folder = resolve_folder(name)
    with lock_run_folder(folder):
        return move_complete_run_into_place(folder)


def add_folder_token(name: str, *, complete: bool) -> str:
    """Return NAME@TOKEN for a local folder, so that Flyte's cache forgets folders that lost files.

    Writes a new random token if the folder has no token or is not ``complete``. In a pod, returns the name alone.
    """
    if is_in_pod():
        return name
    path = runs_folder() / ".tokens" / name.replace("/", "-")
    if not complete or not path.exists():
        with atomic_write(path, durable=False) as file:
            file.write(secrets.token_hex(8).encode())
    return f"{name}@{path.read_text()}"


@contextmanager
def make_dated_folder(prefix: str) -> Iterator[Path]:
    """Make a folder PREFIX-TIME-RANDOM, and yield the path. Removes the folder after the block if it is empty."""
    folder = resolve_folder(f"{prefix}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}")
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        with suppress(OSError):  # the folder holds files
            folder.rmdir()


def print_local_files(headline: str, files: Mapping[Path, str]) -> None:
    """Print a headline with the common folder of ``files``, and a line with the meaning of each file.

    All ``files`` must be in the same folder. In a pod, does nothing.
    """
    if not is_in_pod():
        [folder] = {path.parent for path in files}
        width = max(len(path.name) for path in files)
        lines = [f"  {path.name:<{width}}  {content}" for path, content in files.items()]
        print_outcome("\n".join([f"\n{headline} {shorten_path(folder)}", *lines]))
