"""Plan the rungs of a sweep, train the trials, and write the page."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.runs.run_folder import UNFINISHED
from flyte_ddp.pods import paths
from flyte_ddp.pods.platforms import Platform, is_in_pod
from flyte_ddp.pods.retries import read_checkpoints_address, sync_checkpoints_with_store
from flyte_ddp.run import run_training_fraction
from flyte_ddp.storage import join_address
from flyte_ddp.sweep import halving
from flyte_ddp.sweep.halving import TrialResult
from flyte_ddp.sweep.space import Sweep

LOST = "its pods were lost in all attempts, perhaps because memory ran out; the console shows why"


class PlannedRung(NamedTuple):
    """The trials of the next rung, the results of all rungs so far, and the best hyperparameters.

    After the last rung, ``trials`` is empty, and ``best`` has the winner's hyperparameters.
    """

    trials: list[TrialResult]
    done: list[TrialResult]
    best: Hyperparameters


def plan_rung(
    hp: Hyperparameters,
    sweep: Sweep,
    data_version: str,
    *,
    done: Sequence[TrialResult],
    trials: Sequence[TrialResult],
    results: Sequence[TrialResult | None],
) -> PlannedRung:
    """Add a rung's results to ``done``, and return the next rung's trials, or the winner after the last rung.

    Args:
        hp: Hyperparameters that all trials have in common.
        sweep: The varied hyperparameters, and the number of trials and rungs.
        data_version: The version of the data.
        done: The results of earlier rungs.
        trials: The trials of the rung that has ended.
        results: Their results. None for a trial whose pods were lost.
    """
    done = [*done, *(result or replace(trial, failed=LOST) for trial, result in zip(trials, results, strict=True))]
    following = halving.plan_rung(sweep, hp, data_version, done)
    return PlannedRung(following, done, hp if following else halving.pick_winner(done).hp)


def run_trial(platform: Platform, trial: TrialResult, download_data: Callable[[], Path]) -> TrialResult:
    """Train a trial up to the end of a rung, from the newest checkpoint, and return the result.

    In a pod, copies checkpoints from and to the blob store, and keeps the checkpoints for the next rung.

    Args:
        platform: The platform that executes the task.
        trial: The trial, with its hyperparameters.
        download_data: Returns the folder of the prepared data set.
    """

    def train(folder: Path) -> None:
        """Train the trial in ``folder``, up to the end of the rung."""
        # A recorded result would make other executions ignore the checkpoints.
        with sync_checkpoints_with_store(
            platform, folder, folder / UNFINISHED, defer=lambda _: None
        ) as record_start_and_read_settings:
            prepared = download_data()
            run_training_fraction(trial.hp, prepared, folder, trial.steps_divisor, record_start_and_read_settings())

    results = str(paths.resolve_folder("sweeps"))
    if is_in_pod():
        results = join_address(read_checkpoints_address(platform.output_address()), "sweeps")
    return halving.run_rung(trial, results, train)


def write_sweep_page(platform: Platform, done: Sequence[TrialResult], sweep: Sweep, sidecar: Path) -> Path:
    """Write and publish a sweep's page, write the winner's hyperparameters as best.json, and return the page's path.

    In a local run, prints the files. ``sidecar`` is the model.json of the winner.
    """
    from flyte_ddp.sweep import page as pages

    with paths.make_dated_folder("sweep") as folder:
        page = pages.write_sweep_page(sweep, done, sidecar, folder)
    platform.publish_page("Sweep", page.read_text(encoding="ascii"))
    paths.print_local_files("sweep done; written to", {folder / name: what for name, what in pages.PAGES.items()})
    return page
