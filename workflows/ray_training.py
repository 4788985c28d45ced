"""Data set to model on a Ray cluster, one that Flyte sets up for the run.

Run it with ``pyflyte run workflows/ray_training.py ray_training_wf --hp config/fast.json``.
"""

from flytekit import workflow

from flyte_ddp.config import Hyperparameters
from tasks.engines import is_engine_installed
from tasks.preparation import check_inputs
from tasks.training import TrainingOutputs
from workflows.schedules import make_launch_plans

if is_engine_installed("ray"):
    from tasks.ray_training import train_on_ray

    @workflow
    def ray_training_wf(hp: Hyperparameters = Hyperparameters()) -> TrainingOutputs:
        """Train an image classifier on a Ray cluster; what has been trained before is answered from the cache.

        In and out as of training_wf. The nodes and their size are those of the registration (FLYTE_DDP_NODES and
        FLYTE_DDP_PROFILE), or of the cluster that it runs on.

        Args:
            hp: What to train, on which data and how; what is left out has its default.
        """
        checked = check_inputs(hp=hp, engine="ray")
        return train_on_ray(hp=checked.hp, data=checked.data, run_version=checked.run_version)

    globals().update(make_launch_plans(ray_training_wf, taken=globals()))
