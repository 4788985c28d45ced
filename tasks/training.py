"""The training task, in a single pod with a rank on each GPU."""

from pathlib import Path
from typing import TYPE_CHECKING, List, NamedTuple

from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.config import Hyperparameters
from tasks import pods
from tasks.flyte import PLATFORM, PythonPickledFile, flyte_task, output_file

if TYPE_CHECKING:
    from flyte_ddp.core.runs.work import Launch


class TrainingOutputs(NamedTuple):
    """The outputs of a training."""

    epoch_accuracies: List[float]  # the main measure on the test split after each evaluation, by default the accuracy
    model_state: PythonPickledFile
    sidecar: FlyteFile
    report: FlyteFile
    metrics: FlyteFile


@flyte_task(**pods.training_pod_options(), cache=pods.training_cache())
def train_model(hp: Hyperparameters, data: FlyteDirectory, run_version: str) -> TrainingOutputs:
    """Train a model with distributed data parallelism in a single pod, with a rank on each GPU, else on CPUs.

    The inputs are outputs of check_inputs. The outputs are those of training_wf. If the folder of a local run already
    has the outputs, returns them without training. A pod resumes from the run's newest checkpoint, and publishes the
    report during training.
    """
    return train_and_make_outputs(hp, data, run_version)


def train_and_make_outputs(
    hp: Hyperparameters, data: FlyteDirectory, run_version: str, launch: "Launch | None" = None
) -> TrainingOutputs:
    """Download the data, train a model in the run's folder, and return the outputs of a training task.

    If a local run is finished, does not train, unless retraining is requested. ``launch`` starts the ranks (None: in
    this pod or machine).
    """
    from flyte_ddp.task_bodies.training import train_in_run_folder

    result = train_in_run_folder(PLATFORM, hp, lambda: Path(data.download()), run_version, launch)
    return TrainingOutputs(
        epoch_accuracies=result.epoch_accuracies,
        model_state=output_file(PythonPickledFile, result.model),
        sidecar=output_file(FlyteFile, result.sidecar),
        report=output_file(FlyteFile, result.report),
        metrics=output_file(FlyteFile, result.metrics),
    )
