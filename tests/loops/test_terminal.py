"""A program whose terminal is closed, and one that was started without standard streams."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli import HELPERS
from processes import wait_until

from flyte_ddp.core.machine.streams import open_missing_streams

PROGRAM = [sys.executable, str(HELPERS / "terminal_loop.py")]


def start(folder: Path, *command: str) -> "subprocess.Popen[str]":
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*command], cwd=folder, text=True, start_new_session=True, **pipes)  # type: ignore[call-overload]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["spawn", pytest.param("elastic", marks=pytest.mark.exhaustive)])
def test_a_closed_terminal_stops_a_run_which_goes_on_later(launcher: str, tmp_path: Path) -> None:
    with start(tmp_path, *PROGRAM, launcher) as program:
        wait_until((tmp_path / "started").exists)
        os.killpg(program.pid, signal.SIGHUP)
        _, errors = program.communicate(timeout=60)
    assert program.returncode == 1
    assert "StoppedError: stopped by SIGHUP; the same run will go on after step" in errors
    (tmp_path / "end").touch()
    with start(tmp_path, *PROGRAM, launcher) as program:
        output, errors = program.communicate(timeout=60)
    assert program.returncode == 0, errors
    assert "rank 0 begins after step" in output
    assert "rank 0 begins after step 0" not in output


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["elastic", pytest.param("spawn", marks=pytest.mark.exhaustive)])
def test_nohup_is_heeded(launcher: str, tmp_path: Path) -> None:
    with start(tmp_path, "nohup", *PROGRAM, launcher) as program:
        wait_until((tmp_path / "started").exists)
        os.killpg(program.pid, signal.SIGHUP)
        (tmp_path / "end").touch()
        _, errors = program.communicate(timeout=60)
    assert program.returncode == 0, errors
    assert int((tmp_path / "result").read_text()) > 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "closed", ["<&- >&- 2>&-", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in (">&-", "2>&-"))]
)
def test_a_program_without_standard_streams_ends_well(closed: str, tmp_path: Path) -> None:
    (tmp_path / "end").touch()
    command = f"{sys.executable} {PROGRAM[1]} spawn {closed}"
    assert subprocess.run(["/bin/sh", "-c", command], cwd=tmp_path, check=False, timeout=60).returncode == 0
    assert (tmp_path / "result").read_text() == "1"


def test_streams_that_are_there_are_left_alone() -> None:
    before = sys.stdin, sys.stdout, sys.stderr, *(os.fstat(number).st_ino for number in range(3))
    open_missing_streams()
    assert before == (sys.stdin, sys.stdout, sys.stderr, *(os.fstat(number).st_ino for number in range(3)))
