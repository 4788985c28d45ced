"""Data set to model on torch Elastic, in one pod or several.

Run it with ``pyflyte run workflows/elastic_training.py elastic_training_wf --hp config/fast.json``.
"""

from flytekit import workflow

from flyte_ddp.config import Hyperparameters
from tasks.command_line import is_engine_installed
from tasks.preparation import check_inputs
from tasks.training import TrainingOutputs
from workflows.schedules import make_launch_plans

if is_engine_installed("elastic"):
    from tasks.elastic_training import train_on_elastic

    @workflow
    def elastic_training_wf(hp: Hyperparameters = Hyperparameters()) -> TrainingOutputs:
        """Train a model on torch Elastic. A run that was trained before is answered from the cache.

        Returns accuracies, weights, sidecar, report and metrics, as training_wf does. The registration sets the number
        of nodes (FLYTE_DDP_NODES) and their size (FLYTE_DDP_PROFILE).

        Args:
            hp: What to train, on which data, and how. Fields that are left out have their defaults.
        """
        checked = check_inputs(hp=hp, engine="elastic")
        return train_on_elastic(hp=checked.hp, data=checked.data, run_version=checked.run_version)

    globals().update(make_launch_plans(elastic_training_wf, taken=globals()))
