"""Agents, which start a rank before they know what it has to do."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from processes import processes_with

from flyte_ddp.core.launch.supervise.link import RankInfo

COMMAND = [sys.executable, "-m", "flyte_ddp.core.launch.remote.agent"]


@pytest.mark.parametrize("ticket", [b"", b"none"])
def test_an_agent_that_fails_early_takes_its_rank_along(tmp_path: Path, ticket: bytes) -> None:
    """Whoever started it has ended, or sent what is none."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    given = pickle.dumps(RankInfo(0, 2, 0, "flyte_ddp.core.training.train:train")) + ticket
    ended = subprocess.run(COMMAND, input=given, env=environment, capture_output=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert b"rror" in ended.stderr
    assert [command for command in processes_with(str(tmp_path)).values() if "spawn_main" in command] == []
