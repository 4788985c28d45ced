"""Check the inputs of a training, name the run and the data set, and find or fetch the data set."""

from datetime import UTC, datetime
from pathlib import Path

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.settings import read_settings
from flyte_ddp.core.user_code.callables import split_spec
from flyte_ddp.core.user_code.modules import check_module_is_allowed
from flyte_ddp.core.user_code.source import translate_user_errors
from flyte_ddp.datasets import fetching
from flyte_ddp.plans import identity
from flyte_ddp.plans.resolve import check_requested_resources
from flyte_ddp.pods import paths
from flyte_ddp.pods.outcomes import note_resumability
from flyte_ddp.pods.platforms import NO_SCHEDULE
from flyte_ddp.pods.profiles import compute_node_and_rank_limits


def check_and_identify_run(hp: Hyperparameters, engine: str, kickoff_time: datetime | None) -> tuple[str, str]:
    """Check hyperparameters and the pods' hardware, and return the version of the run and the version of the data.

    Versions are names of folders, and change with the content. Queries the server or folder from which the data come.
    In a local run, also completes an interrupted move of the run's result, and writes the tokens of folders.

    Args:
        hp: Hyperparameters of the run.
        engine: elastic, ray, dask, or "" for a single pod.
        kickoff_time: Time of a schedule, for which the run is separate from other runs. NO_SCHEDULE stands for the
            present time, and None for no schedule.

    Raises:
        UserError: The hyperparameters or the hardware are unfit, or the run is still active.
    """
    for spec in hp.list_user_callables():
        check_module_is_allowed(spec, split_spec(spec)[0])
    identity.check_known_image_size(hp)
    check_requested_resources(hp, *compute_node_and_rank_limits(engine))
    fingerprint = fetching.fingerprint(hp.dataset, hp.data_source, hp.test_dataset)
    note_resumability(kickoff_time is None)
    if kickoff_time == NO_SCHEDULE:
        kickoff_time = datetime.now(UTC)
    run = identity.run_name(hp, fingerprint, trigger=kickoff_time.isoformat() if kickoff_time else "")
    run_version = paths.add_folder_token(run, complete=paths.complete_interrupted_move(run))
    return run_version, name_data_folder(fingerprint)


def identify_data(hp: Hyperparameters) -> str:
    """Return the version of a training's data, which is the name of a folder.

    Queries the server or folder from which the data come. In a local run, writes the token of the folder.
    """
    return name_data_folder(fetching.fingerprint(hp.dataset, hp.data_source, hp.test_dataset))


def name_data_folder(fingerprint: str) -> str:
    data = f"datasets/{fingerprint}"
    return paths.add_folder_token(data, complete=fetching.is_whole(paths.resolve_folder(data)))


def find_or_fetch_data_set(
    dataset: str, data_source: str, test_dataset: str, data_version: str = "", *, sample: str = ""
) -> Path:
    """Return the folder of a prepared data set. Unless the folder is complete, first downloads and prepares the data.

    A complete folder with this content is returned even if the data came from another ``data_source``, such as a mirror
    of a published set. The preparation may run user code, whose errors become UserErrors.

    Args:
        dataset: The hyperparameter ``dataset``.
        data_source: The hyperparameter ``data_source``.
        test_dataset: The hyperparameter ``test_dataset``.
        data_version: The folder's name. If empty, queries the server or folder from which the data come.
        sample: The hyperparameter ``sample``. If set, samples of shards need no image and no label.
    """
    name = data_version or f"datasets/{fetching.fingerprint(dataset, data_source, test_dataset)}"
    folder, progress = paths.resolve_folder(name), read_settings().progress
    if fetching.is_whole(folder):
        return folder
    with translate_user_errors(f"dataset={dataset!r}"):
        return fetching.fetch(dataset, data_source, folder, test_dataset=test_dataset, sample=sample, progress=progress)
