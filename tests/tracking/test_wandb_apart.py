"""Whatever wandb does, training does not notice: the weights are those of a run without it, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_wandb_server import fake_server
from processes import wait_until
from training_runs import QUIET, losses, weights

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.launch import single
from flyte_ddp.core.machine.process import kill_process_trees
from flyte_ddp.core.runs.work import Work
from flyte_ddp.core.settings import Settings
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.run import Result, run_training
from flyte_ddp.tracking import wandb_run

pytestmark = pytest.mark.slow

HP = Hyperparameters(epochs=2, batch_size=100, num_ranks=1, precision="fp32", augment="crop", log_interval=1)
ONLINE = Settings(progress="off", wandb_mode="online", wandb_timeout=2.0)
KEY = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture(scope="module")
def without(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run_training(HP, digits, tmp_path_factory.mktemp("without") / "run", QUIET)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that feed wandb, as they are started."""
    pids: list[int] = []
    start = wandb_run.WandbProcess.__init__

    def start_and_tell(process: wandb_run.WandbProcess, *given: Any, **options: Any) -> None:
        start(process, *given, **options)
        pids.append(process.process.pid)

    monkeypatch.setattr(wandb_run.WandbProcess, "__init__", start_and_tell)
    return pids


def test_the_weights_are_the_same_if_wandb_is_killed(
    digits: Path, without: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[int]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with fake_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)

        def launch(work: Work) -> None:
            wait_until(lambda: server.requests)
            kill_process_trees(lambda: children)
            single.launch(work)

        result = run_training(HP, digits, tmp_path / "run", ONLINE, launch=launch)
    expected, found = weights(without), weights(result)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    kinds, expected_kinds = ([record["kind"] for record in read_records(run.metrics)] for run in (result, without))
    assert kinds == expected_kinds
    assert losses(result) == losses(without)
