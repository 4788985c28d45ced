"""Runs this environment's ``flyte``, the command of Flyte 2, as a user does, in a separate process."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cli import ROOT, Ended, surroundings
from processes import wait_until

from benchmarks.running import descendants, process_name

FLYTE = Path(sys.executable).with_name("flyte")
DEADLINE = 300.0  # seconds, for a machine that is busy; a call takes 2 to 10
LONG: dict[str, Any] = {"dataset": "digits", "num_ranks": 2, "epochs": 7, "batch_size": 64, "eval_interval": 7}
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
PANEL = re.compile(r"╭─+ (?:Exception|Error) ─+╮\n(.*?)╰─+╯", re.DOTALL)


class Flyte2Ended(Ended):
    """The exit code of ``flyte``, and the output of both streams together, without colours."""

    @property
    def panel(self) -> str:
        """The text in the error panel, or "" without a panel."""
        found = PANEL.search(self.output)
        return " ".join(found[1].replace("│", " ").split()) if found else ""

    @property
    def outputs(self) -> str:
        """The printed outputs of a local run that must have succeeded."""
        assert self.exit_code == 0, self.output
        [found] = re.findall(r"Outputs: ActionOutputs\((.*?)\) *│", self.output)
        return found


@dataclass(frozen=True)
class Running:
    """A ``flyte`` command that leads a session, and the file of its output."""

    process: subprocess.Popen[bytes]
    log: Path

    def wait(self) -> Flyte2Ended:
        """Wait up to DEADLINE for the end of the command."""
        exit_code = self.process.wait(DEADLINE)
        return Flyte2Ended(exit_code, COLOURS.sub("", self.log.read_text()))


@contextmanager
def started(
    *arguments: str, home: Path, directory: Path = ROOT, command: Path = FLYTE, **environment: str
) -> Iterator[Running]:
    """Start ``flyte`` with the arguments, and kill the command after the block if it still runs.

    ``home`` stands for the user's home directory, which contains Flyte's cache and the runs folder.
    """
    own = {**surroundings(home, home / "runs"), "COLUMNS": "4000", "FLYTE_DISABLE_SENTRY": "true", **environment}
    log = home / f"log{len([*home.glob('log*')])}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(command), *arguments],
            cwd=directory,
            env=own,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield Running(process, log)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def find_checkpoints(folder: Path) -> set[tuple[Path, int]]:
    """Return path and time of all checkpoints below a folder."""
    found = set()
    for path in folder.rglob("*.ckpt"):
        with suppress(FileNotFoundError):  # replaced meanwhile
            found.add((path, path.stat().st_mtime_ns))
    return found


def stop(home: Path, command: Path, words: list[str], number: signal.Signals, directory: Path = ROOT) -> Flyte2Ended:
    """Run a command until there is another checkpoint, send a signal, and wait for the end of the command.

    SIGINT goes to all processes of the command's session, as from a terminal, and other signals to the command.
    """
    before = find_checkpoints(home)
    with started(*words, home=home, command=command, directory=directory) as running:
        wait_until(lambda: find_checkpoints(home) - before or running.process.poll() is not None, DEADLINE)
        (os.killpg if number == signal.SIGINT else os.kill)(running.process.pid, number)
        return running.wait()


def kill_a_rank(pid: int) -> None:
    """Kill rank 1, which is a descendant of a process."""
    [victim] = [each for each in descendants(pid) if process_name(each) == "rank 1"]
    os.kill(victim, signal.SIGKILL)


def assert_equal_bits(weights: Path, expected: dict[str, torch.Tensor]) -> None:
    """Assert that a file of weights has the same bits as the expected weights."""
    found = torch.load(weights, weights_only=True)
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


def flyte(*arguments: str, **options: Any) -> Flyte2Ended:
    """Run ``flyte`` with the arguments and the options of :func:`started`, for up to DEADLINE."""
    with started(*arguments, **options) as running:
        return running.wait()


def task_words(file: str, task: str, inputs: dict[str, Any]) -> list[str]:
    """Return the arguments of a local run of a task, with inputs as JSON unless they are texts or paths."""
    words = ["run", "--local", file if file.endswith(".py") else f"flyte2/{file}.py", task]
    for name, value in inputs.items():
        words += [f"--{name}", str(value) if isinstance(value, (str, Path)) else json.dumps(value)]
    return words


def run_task(
    file: str,
    task: str,
    home: Path,
    environment: dict[str, str] | None = None,
    directory: Path = ROOT,
    **inputs: Any,
) -> Flyte2Ended:
    """Run ``flyte run --local flyte2/FILE.py TASK`` with inputs. A file with an ending is in ``directory``."""
    return flyte(*task_words(file, task, inputs), home=home, directory=directory, **(environment or {}))
