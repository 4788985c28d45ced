"""Whatever wandb does, training does not notice: the weights are those of a run without it, bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import inline
import pytest
import torch
from fake_wandb_server import fake_server

from flyte_ddp import tracking
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import fetch
from flyte_ddp.run import Result, run_training
from flyte_ddp.settings import Settings
from flyte_ddp.tracking import read_metrics

pytestmark = pytest.mark.slow

HP = Hyperparameters(epochs=2, batch_size=100, num_ranks=1, precision="fp32", augment="crop", log_interval=1)
OFF = Settings(progress="off", wandb_mode="disabled")
ONLINE = Settings(progress="off", wandb_mode="online", wandb_timeout=2.0)
KEY = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fetch("digits", "", tmp_path_factory.mktemp("data") / "digits", progress="off")


@pytest.fixture(scope="module")
def without(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run_training(HP, digits, tmp_path_factory.mktemp("without") / "run", OFF, launch=inline.launch)


@contextmanager
def killed_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kills the process that feeds wandb as soon as it has been started."""
    start = tracking.start_wandb

    def start_and_kill(*arguments: object) -> tracking.WandbProcess | None:
        process = start(*arguments)
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        return process

    with monkeypatch.context() as patch:
        patch.setattr(tracking, "start_wandb", start_and_kill)
        yield


@pytest.mark.parametrize("trouble", ["refuses", "hangs", "fails", "babbles", "denies", "is killed", "cannot write"])
def test_the_weights_are_the_same(
    digits: Path, without: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    behaviour = trouble if trouble in ("refuses", "hangs", "fails", "babbles", "denies") else "works"
    folder = tmp_path / "run"
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    if trouble == "cannot write":  # wandb's own files; as on a full disk
        folder.mkdir()
        (folder / "wandb").symlink_to("/dev/full")
    with fake_server(behaviour) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        with killed_at_once(monkeypatch) if trouble == "is killed" else monkeypatch.context():
            result = run_training(HP, digits, folder, ONLINE, launch=inline.launch)
    expected, found = (torch.load(run.model, weights_only=True) for run in (without, result))
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    losses = [[record.get("loss") for record in read_metrics(run.metrics)] for run in (without, result)]
    assert losses[0] == losses[1]
