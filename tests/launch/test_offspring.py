"""What a user's model starts in a rank does not outlive the run."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import offspring_models
import pytest
from engines import DASK, RAY, SPAWN, Launch, on
from faulty_runs import HP
from processes import processes_with, wait_until
from trials import Trial

from benchmarks.running import descendants
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import RankError
from flyte_ddp.core.launch import single

pytestmark = pytest.mark.slow

PARENTAL = replace(HP, model="offspring_models:parental", max_steps=5)
# Loader processes, too, are deaf to SIGTERM, as such libraries may be.
LOADING = replace(PARENTAL, augment="own_loading:leave_pid")
ALONE = """
import importlib, os, signal, sys
from pathlib import Path
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.machine import process
from training_runs import train_in

def mine():
    return {"takes in orphans": process.become_subreaper(False), "SIGCHLD": signal.getsignal(signal.SIGCHLD)}

hp, data, run = Hyperparameters.from_json(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
launch, before, error = importlib.import_module(sys.argv[1]).launch, mine(), "no error"
try:
    train_in(run, hp, data, launch=launch)
except Exception as raised:
    error = type(raised).__name__
print(error)
print("survivors:", [*(process.list_children(os.getpid()) - process.list_helper_pids())])
print("changed:", [name for name, value in mine().items() if value != before[name]])
"""


def survivors(trial: Trial) -> list[str]:
    """Of those that models have started, three for each rank, and of loader processes."""
    started = [int(path.name) for path in (trial.temporary / "started").iterdir()]
    assert len(started) > 3
    return [state for pid in started if (state := offspring_models.state(pid)) not in ("", "Z")]


def alone(launcher: str, trial: Trial, hp: Hyperparameters) -> subprocess.Popen[str]:
    """The same in a process where nobody else has children; it says what it has changed of itself."""
    arguments = [f"flyte_ddp.core.launch.{launcher}", hp.to_json(), str(trial.digits), str(trial.folder)]
    command = [sys.executable, "-c", ALONE, *arguments]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": "."}, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A child of this process that is none of a run's."""
    with subprocess.Popen(["sleep", "1000"]) as started:
        yield started
        started.kill()


def test_after_a_good_end(bystander: subprocess.Popen[bytes], trial: Trial) -> None:
    """Processes that others have started stay."""
    trial.train(PARENTAL)
    wait_until(lambda: not survivors(trial))
    assert bystander.poll() is None


@on(SPAWN, without=[DASK, RAY])
def test_after_a_failure(launch: Launch, trial: Trial) -> None:
    trial.inject("ArithmeticError")
    with pytest.raises(RankError):
        trial.train(LOADING, launch=launch)
    wait_until(lambda: not survivors(trial))


def test_after_the_launcher_was_killed(trial: Trial) -> None:
    trial.inject("hang")
    with alone("spawn", trial, PARENTAL) as launcher:
        below: list[int] = []

        def kill() -> None:
            below.extend(descendants(launcher.pid))
            launcher.kill()

        trial.when_failing(kill).join()
    wait_until(lambda: not any(offspring_models.state(pid) not in ("", "Z") for pid in below))
    assert survivors(trial) == []
    assert processes_with(str(trial.temporary)) == {}
    assert [path.name for path in trial.temporary.iterdir()] == ["started"]


def test_one_rank_in_the_launching_process(trial: Trial) -> None:
    """Also what has left its parent; nothing else stays as it was made for that."""
    with alone("single", trial, replace(PARENTAL, num_ranks=1)) as process:
        assert process.communicate()[0].splitlines() == ["no error", "survivors: []", "changed: []"]
    assert survivors(trial) == []


def test_one_rank_leaves_others_alone(bystander: subprocess.Popen[bytes], trial: Trial) -> None:
    trial.train(replace(HP, num_ranks=1, max_steps=2, model="offspring_models:without_daemon"), launch=single.launch)
    assert bystander.poll() is None
    # Two of the model that was trained, and two of the one into which its file was loaded in the end.
    started = (trial.temporary / "started").iterdir()
    assert [offspring_models.state(int(path.name)) for path in started] == ["Z"] * 4
