"""Train on the digits in the folder of a test, with one thread a rank: more cost a multiple on 8x8 pixels."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import RankError
from flyte_ddp.order.sampling import Indices
from flyte_ddp.run import Result, run_training
from flyte_ddp.settings import Settings
from flyte_ddp.training import train as training
from flyte_ddp.training.recording import StepSums
from flyte_ddp.training.training_state import TrainingState

QUIET = Settings(progress="off", wandb_mode="disabled")
Train = Callable[..., Result]


def train_in(
    folder: Path, hp: Hyperparameters, data: Path, settings: Settings = QUIET, launch: Any = None, **changes: Any
) -> Result:
    """Train in a folder, with changes of the settings."""
    return run_training(hp, data, folder, replace(settings, **changes), launch=launch, threads=1)


def cut_off(run: Callable[[], Result], at: int) -> None:
    """Train with a single rank, and run out of memory in the step after ``at`` steps."""
    compute = training.compute_gradients

    def fail(state: TrainingState, batch: Indices) -> StepSums:
        if state.step == at:
            raise MemoryError
        return compute(state, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "compute_gradients", fail)
        with pytest.raises(RankError, match="MemoryError"):
            run()


@pytest.fixture
def train(digits: Path, tmp_path: Path) -> Train:
    """Return a function that trains in the folder ``run``, or in that of another name, with changes of QUIET."""
    return lambda hp, name="run", **changes: train_in(tmp_path / name, hp, digits, **changes)
