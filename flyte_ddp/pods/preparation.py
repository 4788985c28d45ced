"""What comes before training: inputs are checked, the run is identified, and its data set is fetched."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from flyte_ddp import datasets, hardware
from flyte_ddp.config import Hyperparameters
from flyte_ddp.pods import paths
from flyte_ddp.pods.platforms import Platform
from flyte_ddp.pods.profiles import nodes_and_ranks
from flyte_ddp.runs import identity
from flyte_ddp.runs.run_folder import is_finished
from flyte_ddp.settings import check_wandb, from_environment

NO_SCHEDULE = datetime(1970, 1, 1, tzinfo=UTC)  # kickoff time of a retraining that no schedule started


@dataclass(frozen=True)
class RunInputs:
    """What identifies a run and its data set.

    Args:
        run_name: Name of the run, and of its folder.
        run_version: The same with the folder's token.
        data_version: Name of the data set's folder, likewise.
    """

    run_name: str
    run_version: str
    data_version: str


def check_and_identify(
    platform: Platform, hp: Hyperparameters, engine: str, kickoff_time: datetime | None
) -> RunInputs:
    """Check hyperparameters against the hardware that there will be, reserve the run, and return what identifies it.

    Asks the data's origin which version they have. Locally checks wandb's settings, too: those of pods were checked at
    registration.

    Raises:
        UserError: a hyperparameter or a setting is wrong, or the data's origin does not answer.
    """
    if platform.is_local():
        check_wandb()
    identity.check_known_image_size(hp)
    hardware.check_requested(hp, *nodes_and_ranks(engine))
    fingerprint = datasets.fingerprint(hp.dataset, hp.data_source, hp.test_dataset)
    if kickoff_time == NO_SCHEDULE:
        kickoff_time = datetime.now(UTC)
    name = identity.run_name(hp, fingerprint, trigger=kickoff_time.isoformat() if kickoff_time else "")
    run, data = paths.reserve_run(platform, name), f"datasets/{fingerprint}"
    return RunInputs(
        run_name=run,
        run_version=paths.with_token(platform, run, complete=is_finished(paths.folder_for(platform, run))),
        data_version=paths.with_token(platform, data, complete=datasets.is_whole(paths.folder_for(platform, data))),
    )


def fetch_data_set(
    platform: Platform, dataset: str, data_source: str, test_dataset: str, data_version: str = ""
) -> Path:
    """Download, verify and prepare a data set in a folder, unless it is there, and return the folder.

    Args:
        platform: What runs this task.
        dataset: Name of the data set, as in the hyperparameters.
        data_source: Where its files are, likewise.
        test_dataset: Data set to test on, likewise.
        data_version: Name of the folder, with or without a token. Empty asks the data's origin.
    """
    name = data_version or f"datasets/{datasets.fingerprint(dataset, data_source, test_dataset)}"
    folder, progress = paths.folder_for(platform, name), from_environment().progress
    return datasets.fetch(dataset, data_source, folder, test_dataset=test_dataset, progress=progress)
