"""Train on the digits in the folder of a test, with one thread a rank: more cost a multiple on 8x8 pixels."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flyte_ddp.config import Hyperparameters
from flyte_ddp.hardware import detect_hardware
from flyte_ddp.run import Result, run_training
from flyte_ddp.settings import Settings

QUIET = Settings(progress="off", wandb_mode="disabled")
Train = Callable[..., Result]


def train_in(
    folder: Path, hp: Hyperparameters, data: Path, settings: Settings = QUIET, launch: Any = None, **changes: Any
) -> Result:
    """Train in a folder, with changes of the settings."""
    hardware = replace(detect_hardware(hp), threads=1)
    return run_training(hp, data, folder, replace(settings, **changes), launch=launch, hardware=hardware)


@pytest.fixture
def train(digits: Path, tmp_path: Path) -> Train:
    """Return a function that trains in the folder ``run``, or in that of another name, with changes of QUIET."""
    return lambda hp, name="run", **changes: train_in(tmp_path / name, hp, digits, **changes)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Let what tests compute themselves take one thread, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
