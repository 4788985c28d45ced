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
import pytest
from faulty_runs import saved
from flyte_ddp.launch.supervise.link import RankInfo
from processes import processes_with
from trials import Trial

from flyte_ddp.errors import StoppedError

COMMAND = [sys.executable, "-m", "flyte_ddp.launch.remote.agent"]


@pytest.mark.parametrize("ticket", [b"", b"none"])
def test_an_agent_that_fails_early_takes_its_rank_along(tmp_path: Path, ticket: bytes) -> None:
    """Whoever started it has ended, or sent what is none."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    given = pickle.dumps(RankInfo(0, 2, 0, "flyte_ddp.training.train:train")) + ticket
    ended = subprocess.run(COMMAND, input=given, env=environment, capture_output=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert b"rror" in ended.stderr
    assert [command for command in processes_with(str(tmp_path)).values() if "spawn_main" in command] == []


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_stop_while_agents_are_to_come_again_names_the_newest_checkpoint(trial: Trial) -> None:
    """As where a node of a Ray cluster is drained, and the launcher's node a second later."""
    trial.inject("SIGKILL")
    refuse_failed = agents.refuse_failed

    def stop_when_there_is_a_checkpoint(sent: Sequence[Future[None]]) -> None:
        if saved(trial.folder):
            os.kill(os.getpid(), signal.SIGTERM)
        refuse_failed(sent)

    trial.patch.setattr(agents, "refuse_failed", stop_when_there_is_a_checkpoint)
    with pytest.raises(StoppedError, match="the same run will go on after step 3, which is saved"):
        trial.train(launch=partial(agents.launch, retries=1))
