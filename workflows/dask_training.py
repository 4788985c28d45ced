"""Data set to model on a Dask cluster, one that Flyte sets up for the run.

Run it with ``pyflyte run workflows/dask_training.py dask_training_wf --hp config/fast.json``.
"""

from flytekit import workflow

from flyte_ddp.config import Hyperparameters
from tasks.command_line import is_engine_installed
from tasks.preparation import check_inputs
from tasks.training import TrainingOutputs
from workflows.schedules import make_launch_plans

if is_engine_installed("dask"):
    from tasks.dask_training import train_on_dask

    @workflow
    def dask_training_wf(hp: Hyperparameters = Hyperparameters()) -> TrainingOutputs:
        """Train a model on a Dask cluster. A run that was trained before is answered from the cache.

        Returns accuracies, weights, sidecar, report and metrics, as training_wf does. The registration sets the number
        of nodes (FLYTE_DDP_NODES) and their size (FLYTE_DDP_PROFILE).

        Args:
            hp: What to train, on which data, and how. Fields that are left out have their defaults.
        """
        checked = check_inputs(hp=hp, engine="dask")
        return train_on_dask(hp=checked.hp, data=checked.data, run_version=checked.run_version)

    globals().update(make_launch_plans(dask_training_wf, taken=globals()))
