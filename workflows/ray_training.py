"""Data set to model on a Ray cluster, one that Flyte sets up for the run.

Run it with ``pyflyte run workflows/ray_training.py ray_training_wf --hp config/fast.json``.
"""

from flytekit import workflow

from flyte_ddp.config import Hyperparameters
from tasks.engines import installed
from tasks.preparation import check_inputs, fetch_dataset
from tasks.training import TrainingOutputs

if installed("ray"):
    from tasks.ray_training import train_on_ray

    @workflow
    def ray_training_wf(hp: Hyperparameters = Hyperparameters()) -> TrainingOutputs:
        """Train an image classifier on a Ray cluster; what has been trained before is answered from the cache."""
        checked = check_inputs(hp=hp)
        data = fetch_dataset(
            dataset=hp.dataset,
            data_source=hp.data_source,
            test_dataset=hp.test_dataset,
            data_version=checked.data_version,
        )
        return train_on_ray(hp=hp, data=data, run_version=checked.run_version)
