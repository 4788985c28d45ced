"""The task that replaces training when a finished run is released."""

from typing import List, NamedTuple

from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp import storage
from flyte_ddp.datasets.prepared_folder import DESCRIPTION
from flyte_ddp.pods import paths
from flyte_ddp.pods.platforms import is_in_pod
from flyte_ddp.release.finished_run import FinishedRun
from flyte_ddp.run import read_run_result
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
    finished = FinishedRun.read(run)
    description = download_from_folder(data, DESCRIPTION)
    assert description is not None
    finished.check_data(description)
    folder = storage.find_local_path(run)
    if folder is None:
        with paths.make_dated_folder("loaded") as folder:
            finished.download(folder)
    if not is_in_pod():
        print(f"{run} is a finished run; its model is judged without training", flush=True)
    result = read_run_result(folder)
    return LoadedRun(
        epoch_accuracies=result.epoch_accuracies,
        model_state=output_file(PythonPickledFile, result.model),
        sidecar=output_file(FlyteFile, result.sidecar),
    )
