"""The training task: one pod, one rank for each of its GPUs."""

from collections.abc import Callable
from pathlib import Path
from typing import List, NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import from_here
from flyte_ddp.pods import paths
from flyte_ddp.pods.live_page import show_while_training
from flyte_ddp.pods.wandb_settings import keep_unsent, read_settings
from flyte_ddp.run import Result, read_result, run_training
from flyte_ddp.runs.run_folder import is_finished
from flyte_ddp.settings import Settings
from tasks import pods
from tasks.flyte import PLATFORM, output_file, report_refused_inputs, sync_checkpoints, translate_errors_for_flyte
from tasks.pickled_file import PythonPickledFile


class TrainingOutputs(NamedTuple):
    """What training returns."""

    epoch_accuracies: List[float]
    model_state: PythonPickledFile
    sidecar: FlyteFile
    report: FlyteFile
    metrics: FlyteFile


Train = Callable[[Hyperparameters, Path, Path, Settings], Result]  # of data, into a run folder


@report_refused_inputs
@task(**pods.training_pod())
def train_model(hp: Hyperparameters, data: FlyteDirectory, run_version: str) -> TrainingOutputs:
    """Train a model with distributed data parallelism on all GPUs of one pod.

    Returns the test accuracy after each epoch, the weights (a bare state_dict), a JSON sidecar that makes them usable,
    an HTML report, and all metrics as JSON lines.
    """
    return training_outputs(train_in_run_folder(hp, data, run_version, run_training))


def train_in_run_folder(hp: Hyperparameters, data: FlyteDirectory, run_version: str, train: Train) -> Result:
    """Download the data and train in the run's folder, unless its result is there, and return the result.

    In a pod, begins with the run's newest checkpoint, uploads new ones, and keeps the console's page up to date.

    Args:
        hp: Hyperparameters.
        data: Folder of the prepared data set.
        run_version: Name of the run, with its token.
        train: Launches the ranks and returns the result.
    """
    with translate_errors_for_flyte():
        result = read_finished_run(run_version)
        if result is None:
            folder = paths.folder_for(PLATFORM, run_version)
            with (
                show_while_training(PLATFORM, folder),
                keep_unsent(PLATFORM, folder),
                sync_checkpoints(folder) as note_start,
            ):
                prepared = Path(data.download())
                note_start()
                result = train(hp, prepared, folder, read_settings(PLATFORM, folder.name))
    return result


def read_finished_run(run_version: str) -> Result | None:
    """Return the result of a finished local run, unless it is to be trained again; None in a pod.

    Flyte's cache may not know it: its launching process was killed at the very end, or another launcher has trained it.
    """
    folder = paths.folder_for(PLATFORM, run_version)
    if not PLATFORM.is_local() or PLATFORM.is_retraining_requested() or not is_finished(folder):
        return None
    print(f"{from_here(folder)}: is finished already; --overwrite-cache trains it again", flush=True)
    return read_result(folder)


def training_outputs(result: Result) -> TrainingOutputs:
    """Return a result as a training task's outputs; in a local run, print where its files are."""
    headline = f"test accuracy {result.test_accuracy:.2%}; made in"
    files = {
        result.model: "the weights, a bare state_dict",
        result.sidecar: "what makes them usable: classes, normalisation, metrics",
        result.report: "the report, to open in a browser",
        result.metrics: "all metrics, one JSON object a line",
    }
    paths.print_files(PLATFORM, headline, files)
    return TrainingOutputs(
        epoch_accuracies=result.epoch_accuracies,
        model_state=output_file(PythonPickledFile, result.model),
        sidecar=output_file(FlyteFile, result.sidecar),
        report=output_file(FlyteFile, result.report),
        metrics=output_file(FlyteFile, result.metrics),
    )
