"""Check the inputs of a training before any large pod starts."""

from datetime import datetime
from typing import NamedTuple

from flyte_ddp.config import Hyperparameters
from flyte_ddp.pods import paths
from flyte_ddp.pods.run_inputs import check_and_identify_run, identify_data


class TrainingInputs(NamedTuple):
    """Checked hyperparameters, and the versions of the data and the run. The run is "" if nothing is to be trained."""

    hp: Hyperparameters
    data_version: str
    run_version: str


def check_training_inputs(
    hp: Hyperparameters, kickoff_time: datetime | None, engine: str, model_name: str | None, run: str
) -> TrainingInputs:
    """Check hyperparameters, the name of a model, and the pods' hardware, and identify the run and the data.

    In a local run, also completes an interrupted move of the run's result, and writes the tokens of folders.

    Args:
        hp: Hyperparameters of the run.
        kickoff_time: Time of a schedule, for which the run is separate from other runs. NO_SCHEDULE stands for the
            present time, and None for no schedule.
        engine: elastic, ray, dask, or "" for a single pod.
        model_name: Name of a model in the registry. None for a training without a release.
        run: Folder or address of a finished run. Its hyperparameters replace ``hp``, and nothing is to be trained.

    Raises:
        UserError: The hyperparameters, the name or the hardware are unfit, or the run is still active.
    """
    if model_name is not None:
        from flyte_ddp.release.registry import Registry

        Registry(paths.read_registry_address(), model_name)  # raises UserError for an invalid name
    if not run:
        run_version, data_version = check_and_identify_run(hp, engine, kickoff_time)
        return TrainingInputs(hp, data_version, run_version)
    from flyte_ddp.release.finished_run import FinishedRun

    finished = FinishedRun.read(run)
    finished.check_hyperparameters(hp)
    finished.check_weights()
    return TrainingInputs(finished.hp, identify_data(finished.hp), run_version="")
