"""The arguments of a training's Work. Needs no torch."""

from dataclasses import dataclass
from pathlib import Path

from flyte_ddp.config import Hyperparameters
from flyte_ddp.settings import Settings

INITIAL_WEIGHTS = "initial weights"  # key in Work.files


@dataclass(frozen=True)
class Training:
    """What to train, on which prepared data, and with which settings."""

    hp: Hyperparameters
    settings: Settings
    data: Path  # folder of the prepared data set
