"""Train in the folder of a test with one thread per rank (more are slower on 8x8 pixels), and read results."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import RankError, UserError
from flyte_ddp.core.order.sampling import Indices
from flyte_ddp.core.runs.run_folder import UNFINISHED
from flyte_ddp.core.settings import Settings
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.core.training import train as training
from flyte_ddp.core.training.recording import StepSums
from flyte_ddp.core.training.training_state import TrainingState
from flyte_ddp.datasets.prepared_set import write_prepared_set
from flyte_ddp.datasets.sample_arrays import SampleArrays
from flyte_ddp.run import Result, run_training

QUIET = Settings(progress="off", wandb_mode="disabled", restarts=0)
Train = Callable[..., Result]


def train_in(
    folder: Path, hp: Hyperparameters, data: Path, settings: Settings = QUIET, launch: Any = None, **changes: Any
) -> Result:
    """Train in a folder, with changes of the settings."""
    return run_training(hp, data, folder, replace(settings, **changes), launch=launch, threads=1)


def train_on(folder: Path, arrays: SampleArrays, hp: Hyperparameters, **changes: Any) -> Result:
    """Prepare arrays in ``folder/data``, and train in ``folder/run``."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    write_prepared_set(replace(arrays, name=hp.dataset), folder / "data", {})
    return train_in(folder / "run", hp, folder / "data", **changes)


def refuse(folder: Path, arrays: SampleArrays, hp: Hyperparameters, words: str, **changes: Any) -> set[str]:
    """Assert that training raises a UserError with ``words``. Return the kinds of records that were written."""
    with pytest.raises(UserError, match=words) as caught:
        train_on(folder, arrays, replace(hp, **changes))
    assert len(caught.value.message) < 300, "a line or two"
    assert "\n" not in caught.value.message
    metrics = folder / "run" / UNFINISHED / "metrics.jsonl"
    return {record["kind"] for record in read_records(metrics)} if metrics.exists() else set()


def records_of(run: Result, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_records(run.metrics) if record["kind"] == kind]


def losses(run: Result) -> list[float]:
    return [record["loss"] for record in records_of(run, "train")]


def notes(run: Result) -> list[str]:
    return records_of(run, "end")[0]["notes"]


def resumed_steps(run: Result) -> list[int]:
    return [record["resumed_after_step"] for record in records_of(run, "start")]


def weights(run: Result) -> dict[str, torch.Tensor]:
    return torch.load(run.model, weights_only=True)


def cut_off(run: Callable[[], Result], at: int) -> None:
    """Train with a single rank that runs out of memory after ``at`` steps."""
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
    """Return a function that trains in the folder ``run`` or another folder, with changes of QUIET."""
    return lambda hp, name="run", **changes: train_in(tmp_path / name, hp, digits, **changes)
