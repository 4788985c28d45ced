"""A search for hyperparameters: many trials are trained briefly, and few of them to the end.

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
    """The winning hyperparameters, the outputs of their training, and the sweep's page."""

    best: Hyperparameters
    epoch_accuracies: List[float]
    model_state: PythonPickledFile
    sidecar: FlyteFile
    report: FlyteFile
    metrics: FlyteFile
    sweep_report: FlyteFile


@workflow
def sweep_wf(hp: Hyperparameters = Hyperparameters(), sweep: Sweep = Sweep()) -> SweepOutputs:
    """Search hyperparameters by successive halving, and train the best. A repeated sweep trains nothing twice.

    Returns the winning hyperparameters, the outputs of training_wf for them, and a page of all trials. The page is also
    the deck of report_sweep.

    Args:
        hp: Hyperparameters that all trials have in common. Omitted fields have their defaults.
        sweep: Varied hyperparameters, and the number of trials and rungs. Must be given.
    """
    checked = check_inputs(hp=hp)
    found = search(hp=checked.hp, sweep=sweep, data=checked.data, data_version=checked.data_version)
    won = check_inputs(hp=found.best)
    trained = train_model(hp=won.hp, data=won.data, run_version=won.run_version)
    page = report_sweep(done=found.done, sweep=sweep, sidecar=trained.sidecar)
    return SweepOutputs(*(found.best, *trained, page))


globals().update(make_launch_plans(sweep_wf, taken=globals()))
