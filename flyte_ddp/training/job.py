"""The arguments of a training's Work. Needs no torch."""

from dataclasses import dataclass
from pathlib import Path

from flyte_ddp.config import Hyperparameters

INITIAL_WEIGHTS = "initial weights"  # key in Work.files


@dataclass(frozen=True)
class Training:
    """What to train, and on which prepared data."""

    hp: Hyperparameters
    data: Path  # folder of the prepared data set
