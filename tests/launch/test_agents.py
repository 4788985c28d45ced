"""Agents, which start a rank before they know what it has to do."""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import agents
import faults
import pytest
from cli import HELPERS
from faulty_runs import HP, saved
from processes import processes_with

from flyte_ddp.errors import StoppedError
from flyte_ddp.launch.supervise.rank_process import RankInfo
from flyte_ddp.run import run_training
from flyte_ddp.settings import Settings

COMMAND = [sys.executable, "-m", "flyte_ddp.launch.remote.agent"]


@pytest.mark.parametrize("ticket", [b"", b"none"])
def test_an_agent_that_fails_early_takes_its_rank_along(tmp_path: Path, ticket: bytes) -> None:
    """Whoever started it has ended, or sent what is none."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    given = pickle.dumps(RankInfo(0, 2, local_rank=0)) + ticket
    ended = subprocess.run(COMMAND, input=given, env=environment, capture_output=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert b"rror" in ended.stderr
    assert [command for command in processes_with(str(tmp_path)).values() if "spawn_main" in command] == []


@pytest.mark.slow
def test_a_stop_while_agents_are_to_come_again_names_the_newest_checkpoint(
    digits: Path, tmp_path: Path, quiet: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a node of a Ray cluster is drained, and the launcher's node a second later."""
    monkeypatch.chdir(HELPERS)
    faults.inject(monkeypatch, tmp_path / "marker", rank=1, at="training", kind="SIGKILL", **{"pass": 3})
    refuse_failed = agents.refuse_failed

    def stop_when_there_is_a_checkpoint(sent: Sequence[Future[None]]) -> None:
        if saved(tmp_path / "run"):
            os.kill(os.getpid(), signal.SIGTERM)
        refuse_failed(sent)

    monkeypatch.setattr(agents, "refuse_failed", stop_when_there_is_a_checkpoint)
    with pytest.raises(StoppedError) as caught:
        run_training(HP, digits, tmp_path / "run", quiet, launch=partial(agents.launch, retries=1))
    assert caught.value.step == 3
    assert "the same run will go on after step 3, which is saved" in caught.value.message
