"""Train a model in a task, from the data set to the files of the result."""

from collections.abc import Callable
from pathlib import Path

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import shorten_path
from flyte_ddp.core.runs.run_folder import UNFINISHED, is_finished
from flyte_ddp.core.runs.work import Launch
from flyte_ddp.core.text.formatting import format_measure, name_measure
from flyte_ddp.pods import paths
from flyte_ddp.pods.live_page import publish_report_while_training
from flyte_ddp.pods.platforms import Platform, is_in_pod
from flyte_ddp.pods.retries import sync_checkpoints_with_store
from flyte_ddp.run import Result, read_run_result, run_training


def train_in_run_folder(
    platform: Platform,
    hp: Hyperparameters,
    download_data: Callable[[], Path],
    run_version: str,
    launch: Launch | None = None,
) -> Result:
    """Download the data, train a model in the run's folder, and return the result.

    If a local run is finished, returns the result without training, unless retraining is requested. In a pod, publishes
    the report and uploads checkpoints during training. Outside of pods, prints the files and the main measure.

    Args:
        platform: The platform that executes the task.
        hp: Hyperparameters of the run.
        download_data: Returns the folder of the prepared data set.
        run_version: The name of the run's folder, from ``check_training_inputs``.
        launch: Starts the ranks. None: in this pod or on this machine.
    """
    folder = paths.resolve_folder(run_version)
    # A platform's cache misses a run whose launching process was killed at the very end, or that another launcher
    # trained.
    if is_finished(folder) and not is_in_pod() and not platform.is_retraining_requested():
        print(f"{shorten_path(folder)} is already finished; {platform.retraining_request} trains again", flush=True)
        result = read_run_result(folder)
    else:
        with (
            publish_report_while_training(platform, folder),
            sync_checkpoints_with_store(platform, folder, folder / UNFINISHED) as record_start_and_read_settings,
        ):
            prepared = download_data()
            result = run_training(hp, prepared, folder, settings=record_start_and_read_settings(), launch=launch)
    print_result(result)
    return result


def print_result(result: Result) -> None:
    """Print the files and the main measure of a result in a local run."""
    files = {
        result.model: "the weights, a bare state_dict",
        result.sidecar: "what is needed to use the weights: classes, normalisation, metrics",
        result.report: "the report, to open in a browser",
        result.metrics: "all metrics, one JSON object a line",
    }
    name, value = next(iter(result.measures.items()))
    figure = format_measure(name, value).replace("\N{NO-BREAK SPACE}", "")
    paths.print_local_files(f"test {name_measure(name)} {figure}; written to", files)
