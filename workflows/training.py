"""Data set to model: the training workflow and its launch plans.

Run it with ``pyflyte run workflows/training.py training_wf --hp config/fast.json``.
"""

from datetime import datetime

from flytekit import workflow

from flyte_ddp.config import Hyperparameters
from flyte_ddp.pods.platforms import NO_SCHEDULE
from tasks.preparation import check_inputs
from tasks.training import TrainingOutputs, train_model
from workflows.schedules import make_launch_plans


@workflow
def training_wf(hp: Hyperparameters = Hyperparameters()) -> TrainingOutputs:
    """Train a model. A run with the same hyperparameters, data and code is answered from the cache.

    Returns the main measure on the test split after each evaluation, the weights, a sidecar, the report and all
    metrics. The measures are in epoch_accuracies, even if the main measure is not the accuracy. The weights are a bare
    state_dict, and the JSON sidecar holds the facts needed to use the model. The report is an HTML page, also the deck
    of train_model. The metrics have a JSON object on each line.

    Args:
        hp: Model, data and training settings. Omitted fields have their defaults.
    """
    checked = check_inputs(hp=hp)  # also fetches the data set
    return train_model(hp=checked.hp, data=checked.data, run_version=checked.run_version)


@workflow
def retraining_wf(hp: Hyperparameters = Hyperparameters(), kickoff_time: datetime = NO_SCHEDULE) -> TrainingOutputs:
    """Train a model again for each kickoff time, even if nothing else has changed.

    Returns accuracies, weights, sidecar, report and metrics, as training_wf does.

    Args:
        hp: Model, data and training settings. Omitted fields have their defaults.
        kickoff_time: Time at which a schedule started this execution, set by the schedule. Leave 1 January 1970 for
            now.
    """
    checked = check_inputs(hp=hp, kickoff_time=kickoff_time)
    return train_model(hp=checked.hp, data=checked.data, run_version=checked.run_version)


globals().update(make_launch_plans(training_wf, retraining_wf, taken=globals()))
