"""Data set to model: the training workflow and its launch plans.

Run it with ``pyflyte run workflows/training.py training_wf --hp config/fast.json``.
"""

from datetime import datetime

from flytekit import workflow

from flyte_ddp.config import Hyperparameters
from flyte_ddp.pods.preparation import NO_SCHEDULE
from tasks.preparation import check_inputs
from tasks.training import TrainingOutputs, train_model
from workflows.schedules import make_launch_plans


@workflow
def training_wf(hp: Hyperparameters = Hyperparameters()) -> TrainingOutputs:
    """Train an image classifier; a run with the same hyperparameters, data and code is answered from the cache.

    In: hp, of which what is left out has its default, as in {"dataset": "fashion_mnist", "epochs": 3}. Out: the test
    accuracy after each epoch, the weights (a bare state_dict), a JSON sidecar that makes them usable, the report, an
    HTML page that is also the deck of train_model, and all metrics, a JSON object a line.

    Args:
        hp: What to train, on which data and how; what is left out has its default.
    """
    checked = check_inputs(hp=hp)
    return train_model(hp=checked.hp, data=checked.data, run_version=checked.run_version)


@workflow
def retraining_wf(hp: Hyperparameters = Hyperparameters(), kickoff_time: datetime = NO_SCHEDULE) -> TrainingOutputs:
    """Train an image classifier again for each kickoff time, even if nothing else has changed.

    In: hp as of training_wf; kickoff_time, which a schedule fills in. Started by hand it stays 1 January 1970, which
    means now. Out: as of training_wf.

    Args:
        hp: What to train, on which data and how; what is left out has its default.
        kickoff_time: A schedule's tick, which the schedule fills in. Leave 1 January 1970, which means now.
    """
    checked = check_inputs(hp=hp, kickoff_time=kickoff_time)
    return train_model(hp=checked.hp, data=checked.data, run_version=checked.run_version)


globals().update(make_launch_plans(training_wf, retraining_wf, taken=globals()))
