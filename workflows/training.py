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

    Returns the main measure on the test split after each evaluation (epoch_accuracies, also where it is another measure
    than the accuracy), the weights (a bare state_dict), a JSON sidecar that makes them usable, the report (one HTML
    page, also the deck of train_model), and all metrics (one JSON object a line).

    Args:
        hp: What to train, on which data, and how. Fields that are left out have their defaults.
    """
    checked = check_inputs(hp=hp)  # fetches the data set, too
    return train_model(hp=checked.hp, data=checked.data, run_version=checked.run_version)


@workflow
def retraining_wf(hp: Hyperparameters = Hyperparameters(), kickoff_time: datetime = NO_SCHEDULE) -> TrainingOutputs:
    """Train a model again for each kickoff time, even if nothing else has changed.

    Returns accuracies, weights, sidecar, report and metrics, as training_wf does.

    Args:
        hp: What to train, on which data, and how. Fields that are left out have their defaults.
        kickoff_time: When a schedule started this, which the schedule fills in. Leave 1 January 1970: it means now.
    """
    checked = check_inputs(hp=hp, kickoff_time=kickoff_time)
    return train_model(hp=checked.hp, data=checked.data, run_version=checked.run_version)


globals().update(make_launch_plans(training_wf, retraining_wf, taken=globals()))
