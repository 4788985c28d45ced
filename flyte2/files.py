"""Files and folders as inputs and outputs of tasks."""

from pathlib import Path

import flyte
from flyte import storage
from flyte.io import Dir, File

from flyte_ddp.core.errors import UserError
from flyte_ddp.pods.platforms import is_in_pod


def output_file(path: Path) -> File:
    """Return a file as a task's output. A local run leaves the file in place, and a pod uploads the file."""
    return File.from_local_sync(path)


def output_folder(path: Path, name: str = "") -> Dir:
    """Return a folder as a task's output. A local run leaves the folder in place, and a pod uploads the folder.

    With a ``name``, all attempts of a run upload to the same address.
    """
    address = storage.join(flyte.ctx().run_base_dir, name) if name and is_in_pod() else None
    return Dir.from_local_sync(path, remote_destination=address)


def check_paths_exist(**inputs: File | Dir | None) -> None:
    """Raise UserError if a local path of an input does not exist. The names are the options of ``flyte run``."""
    for name, value in inputs.items():
        if value is not None and "://" not in value.path and not Path(value.path).exists():
            raise UserError(f"--{name} {value.path!r}: no such file or folder; see --help")


def download(value: File | Dir) -> Path:
    """Return the local path of a file or a folder, after a download if the address is remote."""
    return Path(value.download_sync())


def download_from_folder(folder: Dir, name: str) -> Path | None:
    """Download the file ``name`` directly in a folder, and return the local path. Returns None without such a file."""
    file = folder.get_file_sync(name)
    return download(file) if file is not None else None
