"""How a program ends that catches no error of run_ranks: with a message on stderr, without the launcher's frames."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import own_functions
import pytest
from cli import DEADLINE, HELPERS
from processes import wait_until

from flyte_ddp import run_ranks
from flyte_ddp.errors import RankError

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


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("fail_alone", ["SIGKILL"], "rank 1 was killed by SIGKILL\nthe same run will restart from scratch, as there "),
        (
            "fail_alone",
            [],
            "own_functions:fail_alone: missing a required argument: 'failure'; give the arguments that ",
        ),
    ],
)
def test_a_killed_rank_and_a_mistake(tmp_path: Path, name: str, arguments: list[str], message: str) -> None:
    with start(tmp_path, name, *arguments) as process:
        errors = process.communicate()[1]
    assert process.returncode == 1
    assert errors.startswith(message)
    assert "Traceback" not in errors


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 1), (signal.SIGINT, -signal.SIGINT)])
def test_a_stop(tmp_path: Path, number: signal.Signals, code: int) -> None:
    marker = tmp_path / "marker"
    with start(tmp_path, "wait_for_stop", "due", str(marker)) as process:
        wait_until(marker.exists, DEADLINE)
        process.send_signal(number)
        errors = process.communicate()[1]
    assert process.returncode == code
    [line] = errors.splitlines()
    assert line.startswith(
        f"stopped by {'SIGTERM' if number == signal.SIGTERM else 'Ctrl-C'}; the same run will go on af"
    )


def test_an_exception_of_the_function_comes_with_its_own_traceback(tmp_path: Path) -> None:
    with start(tmp_path, "fail_alone", "raise") as process:
        errors = process.communicate()[1]
    assert process.returncode == 1
    assert "in fail\n    raise ArithmeticError" in errors
    assert "rank 1: ArithmeticError: own words\n" in errors
    assert "in supervise_ranks" not in errors


def test_an_exception_of_the_only_rank_of_a_run_without_a_folder_comes_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(RankError) as raised:
        run_ranks(own_functions.fail, num_ranks=1)
    sys.excepthook(raised.type, raised.value, raised.tb)
    errors = capfd.readouterr().err
    assert "in fail\n    raise ArithmeticError" in errors
    assert errors.endswith("rank 0: ArithmeticError: own words\n")
