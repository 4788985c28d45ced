"""The task that replaces training when a finished run is released."""

from typing import List, NamedTuple

from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.datasets.prepared_folder import DESCRIPTION
from flyte_ddp.task_bodies import finished_run
from tasks import pods
from tasks.flyte import PythonPickledFile, download_from_folder, flyte_task, output_file


class LoadedRun(NamedTuple):
    """The first outputs of train_model, in the same order.

    In local runs, flytekit matches the outputs of branches by position.
    """

    epoch_accuracies: List[float]
    model_state: PythonPickledFile
    sidecar: FlyteFile


@flyte_task(**pods.storing_pod_options())
def load_finished_run(run: str, data: FlyteDirectory) -> LoadedRun:
    """Return the model of a finished run in place of training. Rejects data that the run was not trained on.

    Outside of pods prints that nothing is trained.
    """
    description = download_from_folder(data, DESCRIPTION)
    assert description is not None
    result = finished_run.load_finished_run(run, description)
    return LoadedRun(
        epoch_accuracies=result.epoch_accuracies,
        model_state=output_file(PythonPickledFile, result.model),
        sidecar=output_file(FlyteFile, result.sidecar),
    )
