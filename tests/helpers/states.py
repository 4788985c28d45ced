"""The state of a training in this process."""

from typing import Any

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.hardware import Hardware
from flyte_ddp.core.settings import Settings
from flyte_ddp.core.training.training_state import TrainingState
from flyte_ddp.plans.opened_data import OpenedData
from flyte_ddp.plans.resolve import resolve


def make_state(
    hp: Hyperparameters, hardware: Hardware, prepared: Any, settings: Settings | None = None
) -> TrainingState:
    """Return the state of a training on a prepared data set. Collective."""
    return TrainingState(resolve(hp), hardware, OpenedData(hp, prepared), None, settings)
