"""How a program ends that catches no error of run_ranks: with a message on stderr, without the launcher's frames."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import own_functions
import pytest
from cli import DEADLINE, HELPERS
from processes import wait_until

from flyte_ddp import run_ranks
from flyte_ddp.errors import RankError, UserError

pytestmark = pytest.mark.slow
SCRIPT = """
import sys, own_functions
from flyte_ddp import run_ranks
name, folder, *arguments = sys.argv[1:]
run_ranks(getattr(own_functions, name), *arguments, num_ranks=2, folder=folder)
"""


def start(tmp_path: Path, name: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "FLYTE_DDP_PROGRESS": "off", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT, name, str(tmp_path / "run"), *arguments]
    return subprocess.Popen(command, cwd=HELPERS, env=environment, stderr=subprocess.PIPE, text=True)


def test_a_stop(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    with start(tmp_path, "wait_for_stop", "due", str(marker)) as process:
        wait_until(marker.exists, DEADLINE)
        process.send_signal(signal.SIGINT)
        errors = process.communicate()[1]
    assert process.returncode == -signal.SIGINT
    [line] = errors.splitlines()
    assert line.startswith("stopped by Ctrl-C; the same run will go on af")


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        (own_functions.fail, (), r"(?s).*in fail\n    raise ArithmeticError.*\nrank 0: ArithmeticError: own words\n"),
        (own_functions.fail_alone, (), "own_functions:fail_alone: missing a required argument: 'failure'; give "),
    ],
)
def test_a_run_without_a_folder(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], function: Any, arguments: Any, words: str
) -> None:
    """The traceback of its only rank is nowhere else."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises((RankError, UserError)) as raised:
        run_ranks(function, *arguments, num_ranks=1)
    sys.excepthook(raised.type, raised.value, raised.tb)
    errors = capfd.readouterr().err
    assert re.match(words, errors)
    assert "in run_call" not in errors
