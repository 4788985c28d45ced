"""Data set to model on torch Elastic, in one pod or several.

Run it with ``pyflyte run workflows/elastic_training.py elastic_training_wf --hp config/fast.json``.
"""

from flytekit import workflow

from flyte_ddp.config import Hyperparameters
from tasks.engines import installed
from tasks.preparation import check_inputs, fetch_dataset
from tasks.training import TrainingOutputs

if installed("elastic"):
    from tasks.elastic_training import train_on_elastic

    @workflow
    def elastic_training_wf(hp: Hyperparameters = Hyperparameters()) -> TrainingOutputs:
        """Train an image classifier on torch Elastic; what has been trained before is answered from the cache."""
        checked = check_inputs(hp=hp)
        data = fetch_dataset(
            dataset=hp.dataset,
            data_source=hp.data_source,
            test_dataset=hp.test_dataset,
            data_version=checked.data_version,
        )
        return train_on_elastic(hp=hp, data=data, run_version=checked.run_version)
