"""The training task: one pod, one rank for each of its GPUs."""

from collections.abc import Callable
from pathlib import Path
from typing import List, NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import from_here
from flyte_ddp.run import Result, read_result, run_training
from flyte_ddp.runs.run_folder import is_finished
from flyte_ddp.settings import Settings
from tasks import places, pods, recovery
from tasks.live_deck import live_deck
from tasks.pickled_file import PythonPickledFile
from tasks.tracking import settings, unsent_kept


class TrainingOutputs(NamedTuple):
    """What training returns."""

    epoch_accuracies: List[float]
    model_state: PythonPickledFile
    sidecar: FlyteFile
    report: FlyteFile
    metrics: FlyteFile


Train = Callable[[Hyperparameters, Path, Path, Settings], Result]  # of data, into a run folder


@recovery.mistakes_in_inputs
@task(**pods.training_pod())
def train_model(hp: Hyperparameters, data: FlyteDirectory, run_version: str) -> TrainingOutputs:
    """Train a model with distributed data parallelism on all GPUs of one pod.

    Returns the test accuracy after each epoch, the weights (a bare state_dict), a JSON sidecar that makes them usable,
    an HTML report, and all metrics as JSON lines.
    """
    return outputs(trained(hp, data, run_version, run_training))


def trained(hp: Hyperparameters, data: FlyteDirectory, run_version: str, train: Train) -> Result:
    """What all training tasks do, whatever starts the ranks."""
    with recovery.guarded():
        folder = places.folder_for(run_version)
        result = finished_before(run_version)
        if result is None:
            with live_deck(folder), unsent_kept(folder), recovery.checkpoints_kept(folder) as ranks_start:
                prepared = Path(data.download())
                ranks_start()
                result = train(hp, prepared, folder, settings(folder.name))
    return result


def finished_before(run_version: str) -> Result | None:
    """Locally, the result of this run if it is finished, but unknown to Flyte's cache.

    Its launching process was killed at the very end, say, or another launcher has trained it.
    """
    folder = places.folder_for(run_version)
    if not places.is_local() or places.asked_to_retrain() or not is_finished(folder):
        return None
    print(f"{from_here(folder)}: is finished already; --overwrite-cache trains it again", flush=True)
    return read_result(folder)


def outputs(result: Result) -> TrainingOutputs:
    """What training tasks return; a local run prints where it is."""
    places.tell(
        f"test accuracy {result.test_accuracy:.2%}; made in",
        {
            result.model: "the weights, a bare state_dict",
            result.sidecar: "what makes them usable: classes, normalisation, metrics",
            result.report: "the report, to open in a browser",
            result.metrics: "all metrics, one JSON object a line",
        },
    )
    return TrainingOutputs(
        epoch_accuracies=result.epoch_accuracies,
        model_state=places.file(PythonPickledFile, result.model),
        sidecar=places.file(FlyteFile, result.sidecar),
        report=places.file(FlyteFile, result.report),
        metrics=places.file(FlyteFile, result.metrics),
    )
