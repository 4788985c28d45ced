"""A search for hyperparameters: many trials are trained briefly, and few of them to the end.

Run it with ``flyte run --local flyte2/sweep.py sweep --sweep sweep.json``.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any

import flyte.errors
from flyte.io import Dir, File

from flyte2 import pods
from flyte2.files import download, output_file
from flyte2.inputs import HyperparametersInput, SweepInput, to_input
from flyte2.schedules import scheduled_task
from flyte2.training import TrainingOutputs, check_inputs, train_model
from flyte_ddp.config import Hyperparameters
from flyte_ddp.pods.platforms import is_in_pod
from flyte_ddp.schedules.entries import SWEEPING
from flyte_ddp.sweep.halving import TrialResult
from flyte_ddp.sweep.space import Sweep, check_sweep
from flyte_ddp.task_bodies import sweep as bodies
from flyteplugins.ddp.platform import PLATFORM, task


@dataclass
class SweepOutputs:
    """The winning hyperparameters, the outputs of their training, and the sweep's page."""

    best: Hyperparameters
    training: TrainingOutputs
    sweep_report: File


@task(pods.TRAINING, retries=pods.TRAINING_RETRIES, timeout=pods.HOURS, report=True)
def run_trial(trial: TrialResult, data: Dir) -> TrialResult:
    """Train a trial up to the end of a rung, from the newest checkpoint."""
    return bodies.run_trial(PLATFORM, trial, lambda: download(data))


async def run_trial_or_record_failure(trial: TrialResult, data: Dir) -> TrialResult:
    """Return the result of a trial. In a pod, the result has the error if all attempts of the trial have failed."""
    try:
        result: TrialResult = await run_trial(trial, data)
    except flyte.errors.BaseRuntimeError as error:
        # The failure of this machine ends a local run. A person may abort a trial to end the sweep. An error with a
        # cause is an error of the SDK in this pod, not the error that the backend reports of the trial.
        if not is_in_pod() or isinstance(error, flyte.errors.ActionAbortedError) or error.__cause__ is not None:
            raise
        return replace(trial, failed=str(error) or error.code)
    return result


async def wait_for_all(trials: list[Coroutine[Any, Any, TrialResult]]) -> list[TrialResult]:
    """Run trials at the same time, and return the results. If a trial raises an error, the other trials still end."""
    results = await asyncio.gather(*trials, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


@task(pods.CHECKS, retries=pods.RETRIES, report=True)
def report_sweep(done: list[TrialResult], sweep: SweepInput, sidecar: File) -> File:
    """Write a sweep's page, also as the report, and the winner's hyperparameters as best.json."""
    return output_file(bodies.write_sweep_page(PLATFORM, done, sweep.check(), download(sidecar)))


@scheduled_task(pods.CHECKS, SWEEPING, retries=pods.RETRIES)
async def sweep(sweep: SweepInput = SweepInput(), hp: HyperparametersInput = HyperparametersInput()) -> SweepOutputs:
    """Search hyperparameters by successive halving, and train the best. A repeated sweep trains nothing twice.

    Returns the winning hyperparameters, the outputs of training for them, and a page of all trials. The page is also
    the report of report_sweep.

    Args:
        sweep: Varied hyperparameters, and the number of trials and rungs. Must be given.
        hp: Hyperparameters that all trials have in common. Omitted fields have their defaults.
    """
    settings: Sweep = sweep.check()
    checked = await check_inputs(hp.check())
    check_sweep(settings, checked.hp)
    planned = bodies.plan_rung(checked.hp, settings, checked.data_version, done=(), trials=(), results=())
    while planned.trials:
        trials = [run_trial_or_record_failure(trial, checked.data) for trial in planned.trials]
        results = await wait_for_all(trials) if is_in_pod() else [await trial for trial in trials]
        planned = bodies.plan_rung(
            checked.hp, settings, checked.data_version, done=planned.done, trials=planned.trials, results=results
        )
    won = await check_inputs(planned.best)
    trained = await train_model(to_input(won.hp), won.data, won.run_version)
    return SweepOutputs(planned.best, trained, await report_sweep(planned.done, sweep, trained.sidecar))
