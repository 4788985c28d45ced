"""Runs this environment's ``pyflyte`` as a user does, in a separate process with a separate home and runs folder."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zygote import MATPLOTLIB

from benchmarks.running import process_name

HELPERS = Path(__file__).parent
ROOT = HELPERS.parents[1]
WORKFLOWS = str(ROOT / "workflows/training.py")
TINY: dict[str, Any] = {"num_ranks": 1, "max_steps": 1}
PYFLYTE = Path(sys.executable).with_name("pyflyte")
DEADLINE = 120.0  # seconds, for a machine that is busy; a call takes 2 to 8
OWN_PREFIXES = ("AWS_", "FLYTE", "PYTHON", "PYTEST", "WANDB_")


@dataclass(frozen=True)
class Ended:
    """The exit code of a process, and the output of both streams together."""

    exit_code: int
    output: str

    @property
    def panel(self) -> str:
        """The text in pyflyte's error panel, or "" without a panel."""
        found = re.search(r"╭─ Error ─+╮\n(.*?)╰─+╯", self.output, re.DOTALL)
        return " ".join(found[1].replace("│", " ").split()) if found else ""


def pyflyte(
    *arguments: str,
    home: Path,
    runs: Path | None = None,
    directory: Path = ROOT,
    wrapper: tuple[str, ...] = (),
    session: bool = False,
    **environment: str,
) -> Ended:
    """Run ``pyflyte`` with the arguments, in ``directory``, for up to DEADLINE. Return exit code and output.

    ``home`` stands for the user's home directory, which contains Flyte's cache. By default it contains the runs folder,
    too. A ``wrapper`` may start the command, and the command may lead a new session. wandb is off and GPUs are hidden
    unless ``environment`` sets other values.
    """
    ended = subprocess.run(
        [*wrapper, str(PYFLYTE), *arguments],
        cwd=directory,
        env={**surroundings(home, runs or home / "runs"), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
        check=False,
        start_new_session=session,
    )
    return Ended(ended.returncode, ended.stdout)


def is_pyflyte(pid: int) -> bool:
    """Return whether a process is a ``pyflyte`` command."""
    return process_name(pid) == PYFLYTE.name


def surroundings(home: Path, runs: Path) -> dict[str, str]:
    """Create a home folder, and return the environment of the folder's user."""
    home.mkdir(parents=True, exist_ok=True)
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(OWN_PREFIXES) and not name.lower().endswith("_proxy")
    }
    own = {
        "HOME": str(home),
        "FLYTE_DDP_RUNS": str(runs),
        "WANDB_MODE": "disabled",
        "CUDA_VISIBLE_DEVICES": "",
        "MPLCONFIGDIR": str(MATPLOTLIB),
        "COLUMNS": "1000",  # the panel of an error must not be wrapped, for example within a path
    }
    return {**inherited, **own}


def train(hp: dict[str, Any], name: str = "training_wf", workflow: str = WORKFLOWS, **options: Any) -> Ended:
    """Run ``pyflyte run WORKFLOW NAME --hp '{...}'``."""
    return pyflyte("run", workflow, name, "--hp", json.dumps(hp), **options)
