"""The training task, in a single pod with a rank on each GPU."""

from pathlib import Path
from typing import TYPE_CHECKING, List, NamedTuple

from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import shorten_path
from flyte_ddp.core.text.formatting import format_measure, name_measure
from flyte_ddp.pods import paths
from flyte_ddp.pods.platforms import is_in_pod
from tasks import pods
from tasks.flyte import PLATFORM, PythonPickledFile, flyte_task, output_file

if TYPE_CHECKING:
    from flyte_ddp.core.runs.work import Launch
    from flyte_ddp.run import Result


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
    return make_training_outputs(train_in_run_folder(hp, data, run_version))


def train_in_run_folder(
    hp: Hyperparameters, data: FlyteDirectory, run_version: str, launch: "Launch | None" = None
) -> "Result":
    """Download the data, train a model in the run's folder, and return the result.

    If a local run is finished, returns the result without training, unless retraining is requested. In a pod, publishes
    the report and uploads checkpoints during training. ``launch`` starts the ranks (None: in this pod or machine).
    """
    from flyte_ddp.core.runs.run_folder import UNFINISHED, is_finished
    from flyte_ddp.pods.live_page import publish_report_while_training
    from flyte_ddp.pods.retries import sync_checkpoints_with_store
    from flyte_ddp.run import read_run_result, run_training

    folder = paths.resolve_folder(run_version)
    # Flyte's cache misses a run whose launching process was killed at the very end, or that another launcher trained.
    if is_finished(folder) and not is_in_pod() and not PLATFORM.is_retraining_requested():
        print(f"{shorten_path(folder)} is already finished; --overwrite-cache trains again", flush=True)
        return read_run_result(folder)
    with (
        publish_report_while_training(PLATFORM, folder),
        sync_checkpoints_with_store(PLATFORM, folder, folder / UNFINISHED) as record_start_and_read_settings,
    ):
        prepared = Path(data.download())
        return run_training(hp, prepared, folder, settings=record_start_and_read_settings(), launch=launch)


def make_training_outputs(result: "Result") -> TrainingOutputs:
    """Return a result as a training task's outputs. In a local run, also prints the files and the main measure."""
    files = {
        result.model: "the weights, a bare state_dict",
        result.sidecar: "what is needed to use the weights: classes, normalisation, metrics",
        result.report: "the report, to open in a browser",
        result.metrics: "all metrics, one JSON object a line",
    }
    name, value = next(iter(result.measures.items()))
    figure = format_measure(name, value).replace("\N{NO-BREAK SPACE}", "")
    paths.print_local_files(f"test {name_measure(name)} {figure}; written to", files)
    return TrainingOutputs(
        epoch_accuracies=result.epoch_accuracies,
        model_state=output_file(PythonPickledFile, result.model),
        sidecar=output_file(FlyteFile, result.sidecar),
        report=output_file(FlyteFile, result.report),
        metrics=output_file(FlyteFile, result.metrics),
    )
