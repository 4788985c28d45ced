"""The steps that all training workflows are made of."""

from collections.abc import Callable
from datetime import datetime

from flyte_ddp.config import Hyperparameters
from tasks.preparation import NO_SCHEDULE, check_inputs, fetch_dataset
from tasks.training import TrainingOutputs


def checked_fetched_trained(
    train: Callable[..., TrainingOutputs], hp: Hyperparameters, kickoff_time: datetime = NO_SCHEDULE
) -> TrainingOutputs:
    """Checks the inputs, fetches the data, and trains.

    Args:
        train: the task that does.
        hp: of the workflow's inputs.
        kickoff_time: of the schedule's tick, for which it is trained anew.
    """
    checked = check_inputs(hp=hp, kickoff_time=kickoff_time)
    data = fetch_dataset(
        dataset=hp.dataset,
        data_source=hp.data_source,
        test_dataset=hp.test_dataset,
        data_version=checked.data_version,
    )
    return train(hp=hp, data=data, run_version=checked.run_version)
