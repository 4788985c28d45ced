"""Tasks of sweeps: plan the rungs, train each trial in a separate pod, and write the page.

None of these tasks is cached.
"""

from functools import partial
from pathlib import Path
from typing import List, NamedTuple, Optional

from flytekit import map_task
from flytekit.core.python_function_task import PythonFunctionTask
from flytekit.core.type_engine import TypeEngine
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.config import Hyperparameters
from flyte_ddp.pods.platforms import is_in_pod
from flyte_ddp.sweep.halving import TrialResult
from flyte_ddp.sweep.space import Sweep, check_sweep
from flyte_ddp.task_bodies import sweep as sweeps
from tasks import pods
from tasks.flyte import PLATFORM, flyte_task, output_file
from tasks.input_form import KnownTransformer

TypeEngine.register(KnownTransformer(TrialResult))
SOME = 0.0001  # share of a rung's trials that must not be lost: at least one


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
    return Planned(*sweeps.plan_rung(hp, sweep, data_version, done=done, trials=trials, results=results))


@flyte_task(**pods.training_pod_options())
def run_rung(trial: TrialResult, data: FlyteDirectory) -> TrialResult:
    """Train a trial up to the end of a rung, from the newest checkpoint.

    In a pod, copies checkpoints from and to the blob store, and keeps the checkpoints for the next rung.
    """
    return sweeps.run_trial(PLATFORM, trial, lambda: Path(data.download()))


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
    page = sweeps.write_sweep_page(PLATFORM, done, sweep, Path(sidecar.download()))
    return output_file(FlyteFile, page)
