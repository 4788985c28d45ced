"""Data set to model: tasks that check the inputs, fetch the data and train.

Run it with ``flyte run --local flyte2/training.py training --hp '{"epochs": 2}'``.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from flyte.io import Dir, File

from flyte2 import pods
from flyte2.files import download, output_file, output_folder
from flyte2.inputs import HyperparametersInput, to_input
from flyte2.schedules import read_start_time, scheduled_task
from flyte_ddp.config import Hyperparameters
from flyteplugins.ddp.platform import PLATFORM, task

if TYPE_CHECKING:
    from flyte_ddp.core.runs.work import Launch


@dataclass
class TrainingOutputs:
    """The outputs of a training."""

    epoch_accuracies: list[float]  # the main measure on the test split after each evaluation, by default the accuracy
    model_state: File
    sidecar: File
    report: File
    metrics: File


@dataclass
class CheckedInputs:
    """Checked hyperparameters, the prepared data set, and the versions of the data and the run ("": no training)."""

    hp: Hyperparameters
    data: Dir
    data_version: str
    run_version: str


@task(pods.DATA, cache=pods.cache_by_content(ignored_inputs=("data_source",)), retries=pods.RETRIES, timeout=pods.HOURS)
def fetch_dataset(dataset: str, data_source: str, test_dataset: str, data_version: str) -> Dir:
    """Download, verify and prepare a data set, once for each version of the content, and return the folder."""
    from flyte_ddp.pods.run_inputs import find_or_fetch_data_set

    return output_folder(find_or_fetch_data_set(dataset, data_source, test_dataset, data_version))


@task(pods.TRAINING, **pods.training_options())
def train_model(hp: HyperparametersInput, data: Dir, run_version: str) -> TrainingOutputs:
    """Train a model with distributed data parallelism in a single pod, with a rank on each GPU, else on CPUs.

    If the folder of a local run already has the outputs, returns them without training. A pod resumes from the run's
    newest checkpoint, and publishes the report during training.
    """
    return train_and_make_outputs(hp.check(), data, run_version)


def train_and_make_outputs(
    hp: Hyperparameters, data: Dir, run_version: str, launch: "Launch | None" = None
) -> TrainingOutputs:
    """Train a model as :func:`train_model` does, and return the outputs. None launches the ranks in this pod."""
    from flyte_ddp.task_bodies.training import train_in_run_folder

    result = train_in_run_folder(PLATFORM, hp, lambda: download(data), run_version, launch)
    return TrainingOutputs(
        epoch_accuracies=result.epoch_accuracies,
        model_state=output_file(result.model),
        sidecar=output_file(result.sidecar),
        report=output_file(result.report),
        metrics=output_file(result.metrics),
    )


async def check_inputs(
    hp: Hyperparameters,
    *,
    engine: str = "",
    kickoff_time: datetime | None = None,
    model_name: str | None = None,
    run: str = "",
) -> CheckedInputs:
    """Check hyperparameters, identify the run, and prepare the data, before any GPU pod starts.

    This function is called by tasks and is not a task. If a data set is downloaded as a whole, the task fetch_dataset
    prepares the data on a larger disk.

    Args:
        hp: Hyperparameters of the run.
        engine: elastic, or "" for a single pod.
        kickoff_time: Time of a schedule, for which the run is separate from other runs. None for no schedule.
        model_name: Name of a model in the registry. None for a training without a release.
        run: Folder or address of a finished run. Its hyperparameters replace ``hp``, and nothing is to be trained.
    """
    from flyte_ddp.datasets import needs_no_download
    from flyte_ddp.pods.run_inputs import find_or_fetch_data_set
    from flyte_ddp.task_bodies.preparation import check_training_inputs

    hp, data_version, run_version = check_training_inputs(hp, kickoff_time, engine, model_name, run)
    data_inputs = (hp.dataset, hp.data_source, hp.test_dataset, data_version)
    if needs_no_download(hp.dataset):
        data = output_folder(find_or_fetch_data_set(*data_inputs, sample=hp.sample), data_version)
    else:
        data = await fetch_dataset(*data_inputs)
    return CheckedInputs(hp, data, data_version, run_version)


@scheduled_task(pods.CHECKS, "training_wf", retries=pods.RETRIES)
async def training(hp: HyperparametersInput = HyperparametersInput()) -> TrainingOutputs:
    """Train a model. A run with the same hyperparameters, data and code is answered from the cache.

    Returns the main measure on the test split after each evaluation, the weights, a sidecar, the report and all
    metrics. The measures are in epoch_accuracies, even if the main measure is not the accuracy. The weights are a bare
    state_dict, and the JSON sidecar holds the facts needed to use the model. The report is an HTML page, also the
    report of train_model. The metrics have a JSON object on each line.

    Args:
        hp: Model, data and training settings. Omitted fields have their defaults.
    """
    checked = await check_inputs(hp.check())
    return await train_model(to_input(checked.hp), checked.data, checked.run_version)


@scheduled_task(pods.CHECKS, "retraining_wf", retries=pods.RETRIES)
async def retraining(hp: HyperparametersInput = HyperparametersInput()) -> TrainingOutputs:
    """Train a model anew at each start, even if nothing has changed.

    Args:
        hp: Model, data and training settings. Omitted fields have their defaults.
    """
    checked = await check_inputs(hp.check(), kickoff_time=await read_start_time())
    return await train_model(to_input(checked.hp), checked.data, checked.run_version)
