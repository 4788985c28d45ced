"""A run's prepared data on a host that may not be the launcher's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from flyte_ddp.catalog import encoded_kind
from flyte_ddp.datasets import fetch, open_prepared
from flyte_ddp.datasets.arrays import read_description
from flyte_ddp.datasets.identity import digest_of
from flyte_ddp.errors import UserError
from flyte_ddp.locks import exclusive
from flyte_ddp.runs.job import Job


def prepared_here(job: Job, fetch_into: Callable[[Path], object] | None = None) -> Path:
    """Where it is: at the launcher's path if that is shared, else in this host's cache, fetched by the first rank.

    Args:
        job: of the run.
        fetch_into: puts it into a folder; None: it is fetched from where the hyperparameters say.

    Raises:
        UserError: it cannot be fetched, or what is fetched here is not what the launcher has.
    """
    if digest(job.data) == job.identity.data:
        return job.data
    hp = job.hp
    # By its content, and not by where that came from; what is prepared of encoded images refers to their addresses.
    name = job.identity.data
    if encoded_kind(hp.dataset):
        name = digest_of([name, hp.dataset, hp.test_dataset])
    folder = job.settings.cache_folder / "prepared" / name
    with exclusive(folder.parent, f"{name}.lock"):
        if not is_whole(folder, job.identity.data):
            shutil.rmtree(folder, ignore_errors=True)  # damaged, or what the source had when another run fetched it
            if fetch_into is None:
                fetch(hp.dataset, hp.data_source, folder, test_dataset=hp.test_dataset, progress="off")
            else:
                fetch_into(folder)
    if digest(folder) != job.identity.data:
        raise UserError(
            f"dataset={hp.dataset!r}: what this host has fetched is not what the launcher has; it must be the same "
            "everywhere, so give an address that all hosts share, or run again if it has just changed"
        )
    return folder


def is_whole(folder: Path, wanted: str) -> bool:
    """Whether the folder holds the prepared data with this digest, with all its files."""
    if digest(folder) != wanted:
        return False
    try:
        open_prepared(folder)
    except (UserError, OSError):
        return False
    return True


def digest(folder: Path) -> str:
    """Of the prepared data in a folder, or nothing."""
    try:
        return str(read_description(folder).get("digest", ""))
    except (UserError, OSError):
        return ""
