"""Data set to model: the training workflow and its launch plans.

Run it with ``pyflyte run workflows/training.py training_wf --hp config/fast.json``.
"""

import os
from datetime import datetime
from typing import List

from flytekit import CronSchedule, Email, LaunchPlan, workflow
from flytekit.models.concurrency import ConcurrencyLimitBehavior, ConcurrencyPolicy
from flytekit.models.core.execution import WorkflowExecutionPhase

from flyte_ddp.config import Hyperparameters
from tasks.pods import NOTIFY_VARIABLE
from tasks.preparation import NO_SCHEDULE, check_inputs
from tasks.training import TrainingOutputs, train_model


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


def failure_notifications() -> List[Email]:
    """Mail to the addresses in ``FLYTE_DDP_NOTIFY`` (comma-separated, read at registration) when an execution fails."""
    recipients = [address.strip() for address in os.environ.get(NOTIFY_VARIABLE, "").split(",") if address.strip()]
    phases = [WorkflowExecutionPhase.FAILED, WorkflowExecutionPhase.TIMED_OUT, WorkflowExecutionPhase.ABORTED]
    return [Email(phases=phases, recipients_email=recipients)] if recipients else []


ONE_AT_A_TIME = ConcurrencyPolicy(max_concurrency=1, behavior=ConcurrencyLimitBehavior.SKIP)

# Train when somebody asks for it.
training_on_demand = LaunchPlan.get_or_create(
    training_wf,
    name="training_on_demand",
    default_inputs={"hp": Hyperparameters()},
    notifications=failure_notifications(),
)

# Retrain every night at 03:00 UTC; a tick is skipped while the run before is still going.
nightly_retraining = LaunchPlan.get_or_create(
    retraining_wf,
    name="nightly_retraining",
    default_inputs={"hp": Hyperparameters()},
    schedule=CronSchedule(schedule="0 3 * * *", kickoff_time_input_arg="kickoff_time"),
    concurrency=ONE_AT_A_TIME,
    notifications=failure_notifications(),
)

# Look every hour, and retrain only if the data or the code has changed: all else is answered from the cache.
retraining_on_change = LaunchPlan.get_or_create(
    training_wf,
    name="retraining_on_change",
    default_inputs={"hp": Hyperparameters()},
    schedule=CronSchedule(schedule="0 * * * *"),
    concurrency=ONE_AT_A_TIME,
    notifications=failure_notifications(),
)
