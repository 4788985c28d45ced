"""The search for a training's prepared data on a host. Needs no torch."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import cast

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.files import hold_lock
from flyte_ddp.core.runs.work import Work
from flyte_ddp.core.training.plan import TrainingJob
from flyte_ddp.datasets import fetch, is_whole
from flyte_ddp.datasets.prepared_folder import read_description
from flyte_ddp.storage.identity import digest_lines


def set_data_folder_on_host(work: Work) -> Work:
    """Return the work with a folder of the prepared data that this host can read.

    If the launcher's folder is visible here with the same data, returns ``work`` unchanged. Otherwise uses a folder in
    this host's cache. If this folder lacks the data, deletes the folder, and fetches the data again. One process of the
    host fetches at a time, and others wait without a limit.

    The arguments of ``work`` must be a TrainingJob.

    Raises:
        UserError: The fetched data differ from the launcher's data, or cannot be fetched.
    """
    given: TrainingJob = work.arguments
    if read_prepared_digest(given.data_folder) == work.identity.data:
        return work
    hp = cast("Hyperparameters", given.plan.hyperparameters)
    folder = cached_data_folder(hp, work.identity.data, work.settings.cache_folder)
    with hold_lock(folder.parent, f"{folder.name}.lock"):
        if not is_whole(folder) or read_prepared_digest(folder) != work.identity.data:
            shutil.rmtree(folder, ignore_errors=True)  # damaged, or from an older state of the source
            kinds = {"test_dataset": hp.test_dataset, "sample": hp.sample}
            fetch(hp.dataset, hp.data_source, folder, **kinds, progress="off")
    if read_prepared_digest(folder) != work.identity.data:
        raise UserError(
            f"dataset={hp.dataset!r}: the data fetched on this host differ from the launcher's data; give an address "
            "that all hosts share, or run again if the data set has just changed"
        )
    return replace(work, arguments=replace(given, data_folder=folder))


def link_data_into_host_cache(hp: Hyperparameters, data: Path, cache_folder: Path) -> None:
    """Put a symlink to the folder ``data`` into this host's cache, where the host's ranks find the prepared data.

    If the cache already has the data, adds nothing. Waits without a limit while another process of this host fetches
    the data.
    """
    folder = cached_data_folder(hp, read_prepared_digest(data), cache_folder)
    with hold_lock(folder.parent, f"{folder.name}.lock"):
        if not folder.exists():
            folder.unlink(missing_ok=True)  # a link to a folder that was deleted
            folder.symlink_to(data)


def cached_data_folder(hp: Hyperparameters, digest: str, cache_folder: Path) -> Path:
    # Named by content, not by source. Prepared data of encoded images refer to addresses, so the addresses count, too.
    name = digest_lines([digest, hp.dataset, hp.test_dataset]) if hp.data_kind.prefix else digest
    return cache_folder / "prepared" / name


def read_prepared_digest(folder: Path) -> str:
    """Return the digest stored with prepared data, or "" if no digest can be read."""
    try:
        return read_description(folder).digest
    except (UserError, OSError):
        return ""
