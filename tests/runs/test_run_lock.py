"""Who may write into a run folder: one run at a time, for as long as it lasts."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from training_runs import QUIET

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import StoppedError, UserError
from flyte_ddp.core.launch import single
from flyte_ddp.core.runs.run_folder import OUTPUTS
from flyte_ddp.core.runs.work import Work
from flyte_ddp.run import run_training

HP = Hyperparameters(num_ranks=1, max_steps=2)

HOLD = """
import pathlib, sys
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.runs.run_folder import lock_run_folder
try:
    with lock_run_folder(pathlib.Path(sys.argv[1])):
        print(True, flush=True)
except UserError:
    print(False, flush=True)
"""


def is_free(folder: Path) -> bool:
    """Return whether another process can get the folder's lock."""
    return subprocess.check_output([sys.executable, "-c", HOLD, str(folder)], text=True) == "True\n"


@pytest.fixture
def elsewhere() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.mark.parametrize("ends_in", [None, StoppedError("SIGTERM")])
def test_a_folder_is_held_until_its_run_ends_whatever_ends_it(
    digits: Path, tmp_path: Path, elsewhere: ThreadPoolExecutor, ends_in: BaseException | None
) -> None:
    folder = tmp_path / "run"

    def launch(work: Work) -> None:
        assert not is_free(folder)
        with pytest.raises(UserError, match="another run is writing into it"):
            elsewhere.submit(run_training, HP, digits, folder, QUIET).result()
        if ends_in is not None:
            raise ends_in
        single.launch(work)

    with suppress(*([] if ends_in is None else [type(ends_in)])):
        run_training(HP, digits, folder, QUIET, launch=launch)
    assert all((folder / name).exists() == (ends_in is None) for name in OUTPUTS)
    assert is_free(folder)


def test_a_fork_of_a_run_that_was_killed_keeps_nothing(tmp_path: Path) -> None:
    """Such as a loader's worker, or a daemon that a model has started, which may live for ever."""
    code = (
        "import os, pathlib, sys, time; from flyte_ddp.core.runs.run_folder import lock_run_folder\n"
        "with lock_run_folder(pathlib.Path(sys.argv[1])):\n"
        "    if os.fork(): os.kill(os.getpid(), 9)\n"
        "    while os.getppid() == int(sys.argv[2]): time.sleep(0.01)\n"
        "    print('lives on', flush=True); sys.stdin.read()"
    )
    command = [
        sys.executable,
        "-c",
        f"import os, sys; sys.argv.append(str(os.getpid()))\n{code}",
        str(tmp_path / "run"),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "lives on\n"
        assert is_free(tmp_path / "run")
