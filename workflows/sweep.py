"""A search for hyperparameters: many trials are trained a little, few of them to the end.

Run it with ``pyflyte run workflows/sweep.py sweep_wf --sweep config/sweep.json``.
"""

from typing import List, NamedTuple

from flytekit import workflow
from flytekit.types.file import FlyteFile

from flyte_ddp.config import Hyperparameters
from flyte_ddp.sweep.space import Sweep
from tasks.flyte import PythonPickledFile
from tasks.preparation import check_inputs
from tasks.sweep import report_sweep, search
from tasks.training import train_model
from workflows.schedules import make_launch_plans


class SweepOutputs(NamedTuple):
    """The hyperparameters that won, what their training returns, and the sweep's page."""

    best: Hyperparameters
    epoch_accuracies: List[float]
    model_state: PythonPickledFile
    sidecar: FlyteFile
    report: FlyteFile
    metrics: FlyteFile
    sweep_report: FlyteFile


@workflow
def sweep_wf(hp: Hyperparameters = Hyperparameters(), sweep: Sweep = Sweep()) -> SweepOutputs:
    """Try hyperparameters by successive halving, and train the best. A sweep given again trains nothing twice.

    Returns the hyperparameters that won, what training_wf returns for them, and a page of all trials, which is also the
    deck of report_sweep.

    Args:
        hp: What all trials have in common. Fields that are left out have their defaults.
        sweep: What is varied, in how many trials and rungs. Must be given.
    """
    checked = check_inputs(hp=hp)
    found = search(hp=checked.hp, sweep=sweep, data=checked.data, data_version=checked.data_version)
    won = check_inputs(hp=found.best)
    trained = train_model(hp=won.hp, data=won.data, run_version=won.run_version)
    page = report_sweep(done=found.done, sweep=sweep, sidecar=trained.sidecar)
    return SweepOutputs(*(found.best, *trained, page))


globals().update(make_launch_plans(sweep_wf, taken=globals()))
