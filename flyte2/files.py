"""Files and folders as inputs and outputs of tasks.

All functions that copy files raise UnreachableError if the blob store has an outage, so that Flyte retries the task.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import flyte
from flyte.io import Dir, File

from flyte_ddp.core.errors import UnreachableError, UserError
from flyte_ddp.pods.platforms import is_in_pod
from flyte_ddp.storage import join_address


def output_file(path: Path) -> File:
    """Return a file as a task's output. A local run leaves the file in place, and a pod uploads the file."""
    with detect_outage():
        return File.from_local_sync(path)


def output_folder(path: Path, name: str = "") -> Dir:
    """Return a folder as a task's output. A local run leaves the folder in place, and a pod uploads the folder.

    With a ``name``, all attempts of a run upload to the same address.
    """
    address = join_address(flyte.ctx().run_base_dir, name) if name and is_in_pod() else None
    with detect_outage():
        return Dir.from_local_sync(path, remote_destination=address)


def download(value: File | Dir) -> Path:
    """Return the local path of a file or a folder, after a download if the address is remote."""
    with detect_outage():
        return Path(value.download_sync())


def download_from_folder(folder: Dir, name: str) -> Path | None:
    """Download the file ``name`` directly in a folder, and return the local path. Returns None without such a file."""
    with detect_outage():
        file = folder.get_file_sync(name)
    return download(file) if file is not None else None


@contextmanager
def detect_outage() -> Iterator[None]:
    """In a pod, raise UnreachableError for an error of the block that is no missing file and no missing permission.

    The SDK has no common type of the errors of servers.
    """
    try:
        yield
    except Exception as error:
        if not is_in_pod() or isinstance(error, (UserError, FileNotFoundError, PermissionError)):
            raise
        raise UnreachableError(f"{type(error).__name__}: {error}") from error
