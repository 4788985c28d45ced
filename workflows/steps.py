"""The steps that all training workflows have in common."""

from collections.abc import Callable

from flyte_ddp.config import Hyperparameters
from tasks.preparation import CheckedInputs, fetch_dataset
from tasks.training import TrainingOutputs


def fetched_and_trained(
    train: Callable[..., TrainingOutputs], hp: Hyperparameters, checked: CheckedInputs
) -> TrainingOutputs:
    """Fetches the data, and trains.

    Args:
        train: the task that does.
        hp: of the workflow's inputs.
        checked: what check_inputs has made of them.
    """
    data = fetch_dataset(
        dataset=hp.dataset,
        data_source=hp.data_source,
        test_dataset=hp.test_dataset,
        data_version=checked.data_version,
    )
    return train(hp=hp, data=data, run_version=checked.run_version)
