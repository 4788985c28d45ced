"""Data set to model on torch Elastic, in one pod or several.

Run it with ``pyflyte run workflows/elastic_training.py elastic_training_wf --hp config/fast.json``.
"""

from flytekit import workflow

from flyte_ddp.config import Hyperparameters
from tasks.engines import installed
from tasks.training import TrainingOutputs
from workflows.steps import checked_fetched_trained

if installed("elastic"):
    from tasks.elastic_training import train_on_elastic

    @workflow
    def elastic_training_wf(hp: Hyperparameters = Hyperparameters()) -> TrainingOutputs:
        """Train an image classifier on torch Elastic; what has been trained before is answered from the cache."""
        return checked_fetched_trained(train_on_elastic, hp)
