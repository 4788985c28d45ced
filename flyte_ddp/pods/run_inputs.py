"""Check the inputs of a training, name the run and the data set, and find or fetch the data set."""

from datetime import UTC, datetime
from pathlib import Path

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.settings import read_settings
from flyte_ddp.core.user_code.callables import split_spec
from flyte_ddp.core.user_code.modules import refuse_foreign_module
from flyte_ddp.core.user_code.source import translate_user_errors
from flyte_ddp.datasets import fetching
from flyte_ddp.plans import identity
from flyte_ddp.plans.resolve import check_requested_resources
from flyte_ddp.pods import paths
from flyte_ddp.pods.platforms import NO_SCHEDULE
from flyte_ddp.pods.profiles import node_and_rank_limits


def check_and_identify_run(hp: Hyperparameters, engine: str, kickoff_time: datetime | None) -> tuple[str, str]:
    """Check hyperparameters and the pods' hardware, and return the versions of run and data.

    The versions are names of folders. Queries the data's origin. Locally completes an interrupted move of the run's
    result, and writes folder tokens.

    Args:
        hp: Hyperparameters of the run.
        engine: elastic, ray, dask, or "" for a single pod.
        kickoff_time: Time of a schedule, which makes this a separate run. NO_SCHEDULE stands for the present time.

    Raises:
        UserError: The hyperparameters or the hardware are unfit, or the run is still active.
    """
    for spec in hp.list_user_callables():
        refuse_foreign_module(spec, split_spec(spec)[0])
    identity.check_known_image_size(hp)
    check_requested_resources(hp, *node_and_rank_limits(engine))
    fingerprint = fetching.fingerprint(hp.dataset, hp.data_source, hp.test_dataset)
    if kickoff_time == NO_SCHEDULE:
        kickoff_time = datetime.now(UTC)
    run = identity.run_name(hp, fingerprint, trigger=kickoff_time.isoformat() if kickoff_time else "")
    run_version = paths.add_folder_token(run, complete=paths.complete_interrupted_move(run))
    return run_version, name_data(fingerprint)


def identify_data(hp: Hyperparameters) -> str:
    """Return the version of a training's data, which is the name of a folder.

    Queries the data's origin. Locally writes a folder token.
    """
    return name_data(fetching.fingerprint(hp.dataset, hp.data_source, hp.test_dataset))


def name_data(fingerprint: str) -> str:
    data = f"datasets/{fingerprint}"
    return paths.add_folder_token(data, complete=fetching.is_whole(paths.resolve_folder(data)))


def find_or_fetch_data_set(
    dataset: str, data_source: str, test_dataset: str, data_version: str = "", *, sample: str = ""
) -> Path:
    """Return the folder of a data set. If the folder is unusable, downloads and prepares the set.

    The preparation may run user code, whose errors become UserErrors.

    Args:
        dataset: The hyperparameter ``dataset``.
        data_source: The hyperparameter ``data_source``.
        test_dataset: The hyperparameter ``test_dataset``.
        data_version: The folder's name. If empty, queries the data's origin for the name.
        sample: The hyperparameter ``sample``. If set, samples of shards need no image and no label.
    """
    name = data_version or f"datasets/{fetching.fingerprint(dataset, data_source, test_dataset)}"
    folder, progress = paths.resolve_folder(name), read_settings().progress
    with translate_user_errors(f"dataset={dataset!r}"):
        return fetching.fetch(dataset, data_source, folder, test_dataset=test_dataset, sample=sample, progress=progress)
