"""Inputs of a training's pods: check them, name the run and its data set, and find or fetch the data set."""

from datetime import UTC, datetime
from pathlib import Path

from flyte_ddp import hardware
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import fetching
from flyte_ddp.pods import paths
from flyte_ddp.pods.platforms import NO_SCHEDULE
from flyte_ddp.pods.profiles import node_and_rank_limits
from flyte_ddp.runs import identity
from flyte_ddp.settings import read_settings
from flyte_ddp.user_code.callables import split_spec
from flyte_ddp.user_code.modules import refuse_foreign_module
from flyte_ddp.user_code.source import explain_own_errors


def check_and_identify_run(hp: Hyperparameters, engine: str, kickoff_time: datetime | None) -> tuple[str, str]:
    """Check hyperparameters and the pods' hardware; return the versions of run and data, which are names of folders.

    ``engine`` is elastic, ray, dask, or "" for one pod. ``kickoff_time`` makes this another run: a schedule's time, or
    NO_SCHEDULE for the present time. Asks the data's origin. Locally completes an interrupted move of the run's result,
    and writes folder tokens; UserError while the run goes on.
    """
    for spec in hp.own_code():
        refuse_foreign_module(spec, split_spec(spec)[0])
    identity.check_known_image_size(hp)
    hardware.check_requested_resources(hp, *node_and_rank_limits(engine))
    fingerprint = fetching.fingerprint(hp.dataset, hp.data_source, hp.test_dataset)
    if kickoff_time == NO_SCHEDULE:
        kickoff_time = datetime.now(UTC)
    run = identity.run_name(hp, fingerprint, trigger=kickoff_time.isoformat() if kickoff_time else "")
    run_version = paths.add_folder_token(run, complete=paths.complete_interrupted_move(run))
    return run_version, name_data(fingerprint)


def identify_data(hp: Hyperparameters) -> str:
    """Return the version of a training's data, the name of a folder. Asks the origin. Writes a local token."""
    return name_data(fetching.fingerprint(hp.dataset, hp.data_source, hp.test_dataset))


def name_data(fingerprint: str) -> str:
    data = f"datasets/{fingerprint}"
    return paths.add_folder_token(data, complete=fetching.is_whole(paths.resolve_folder(data)))


def find_or_fetch_data_set(
    dataset: str, data_source: str, test_dataset: str, data_version: str = "", *, sample: str = ""
) -> Path:
    """Return a data set's folder; if it is unusable, download and prepare the set, which may run the user's code.

    ``data_version`` is the folder's name; "" asks the data's origin for it.
    """
    name = data_version or f"datasets/{fetching.fingerprint(dataset, data_source, test_dataset)}"
    folder, progress = paths.resolve_folder(name), read_settings().progress
    with explain_own_errors(f"dataset={dataset!r}"):
        return fetching.fetch(dataset, data_source, folder, test_dataset=test_dataset, sample=sample, progress=progress)
