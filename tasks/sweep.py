"""Tasks of sweeps: plan the rungs, train each trial in a separate pod, and write the page.

None of these tasks is cached.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import List, NamedTuple, Optional

from flytekit import Deck, map_task
from flytekit.core.python_function_task import PythonFunctionTask
from flytekit.core.type_engine import TypeEngine
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.runs.run_folder import UNFINISHED
from flyte_ddp.pods import paths
from flyte_ddp.pods.platforms import is_in_pod
from flyte_ddp.pods.retries import read_checkpoints_address, sync_checkpoints_with_store
from flyte_ddp.run import run_training_fraction
from flyte_ddp.storage import join_address
from flyte_ddp.sweep import halving
from flyte_ddp.sweep.halving import TrialResult
from flyte_ddp.sweep.space import Sweep, check_sweep
from tasks import pods
from tasks.flyte import PLATFORM, flyte_task, output_file
from tasks.input_form import KnownTransformer

TypeEngine.register(KnownTransformer(TrialResult))
SOME = 0.0001  # share of a rung's trials that must not be lost: at least one
LOST = "its pods were lost in all attempts, perhaps because memory ran out; the console shows why"


class Planned(NamedTuple):
    """The trials of the next rung, the results of all rungs so far, and the best hyperparameters.

    After the last rung, ``trials`` is empty, and ``best`` has the winner's hyperparameters.
    """

    trials: List[TrialResult]
    done: List[TrialResult]
    best: Hyperparameters


@flyte_task(**pods.registry_pod_options())
def plan_rung(
    hp: Hyperparameters,
    sweep: Sweep,
    data_version: str,
    done: List[TrialResult],
    trials: List[TrialResult],
    results: List[Optional[TrialResult]],
) -> Planned:
    """Add a rung's results to ``done``, and return the next rung's trials, or the winner after the last rung."""
    done = done + [result or replace(trial, failed=LOST) for trial, result in zip(trials, results, strict=True)]
    following = halving.plan_rung(sweep, hp, data_version, done)
    return Planned(following, done, hp if following else halving.pick_winner(done).hp)


@flyte_task(**pods.training_pod_options())
def run_rung(trial: TrialResult, data: FlyteDirectory) -> TrialResult:
    """Train a trial up to the end of a rung, from the newest checkpoint.

    In a pod, copies checkpoints from and to the blob store, and keeps the checkpoints for the next rung.
    """

    def train(folder: Path) -> None:
        """Train the trial in ``folder``, up to the end of the rung."""
        # A recorded result would make other executions ignore the checkpoints.
        with sync_checkpoints_with_store(
            PLATFORM, folder, folder / UNFINISHED, defer=lambda _: None
        ) as record_start_and_read_settings:
            prepared = Path(data.download())
            run_training_fraction(trial.hp, prepared, folder, trial.steps_divisor, record_start_and_read_settings())

    results = str(paths.resolve_folder("sweeps"))
    if is_in_pod():
        results = join_address(read_checkpoints_address(PLATFORM.output_address()), "sweeps")
    return halving.run_rung(trial, results, train)


@flyte_task(**pods.registry_pod_options(), execution_mode=PythonFunctionTask.ExecutionBehavior.DYNAMIC)
def search(hp: Hyperparameters, sweep: Sweep, data: FlyteDirectory, data_version: str) -> Planned:
    """Check a sweep, and train the trials rung by rung, each in a separate pod."""
    check_sweep(sweep, hp)
    plan = partial(plan_rung, hp=hp, sweep=sweep, data_version=data_version)
    planned = plan(done=[], trials=[], results=[])
    # A local run has no retries by Flyte, so a machine's failure must end it.
    rung = map_task(partial(run_rung, data=data), min_success_ratio=SOME if is_in_pod() else 1.0)
    for _ in range(sweep.count_trial_groups()):
        results = rung(trial=planned.trials)
        planned = plan(done=planned.done, trials=planned.trials, results=results)
    return planned


@flyte_task(**pods.registry_pod_options(), **pods.WITH_DECK)
def report_sweep(done: List[TrialResult], sweep: Sweep, sidecar: FlyteFile) -> FlyteFile:
    """Write a sweep's page, also as a deck, and the winner's hyperparameters as best.json."""
    from flyte_ddp.sweep.page import PAGES, write_sweep_page

    with paths.make_dated_folder("sweep") as folder:
        page = write_sweep_page(sweep, done, Path(sidecar.download()), folder)
    Deck("Sweep", page.read_text(encoding="ascii"))
    paths.print_local_files("sweep done; written to", {folder / name: what for name, what in PAGES.items()})
    return output_file(FlyteFile, page)
