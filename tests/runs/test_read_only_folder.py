"""A run folder that becomes read-only, at whatever moment, is a sentence that says what to do."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli import HELPERS
from mounts import ALONE, need_mounts

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.files import explain_write_errors

# In a namespace of its own: runs whose folder becomes read-only, each at another moment and in a fork with the imports;
# writes how each ends.
RUN = """
import os, subprocess, sys
from pathlib import Path
import agents
from flyte_ddp import current_rank, run_ranks
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.launch import single
from flyte_ddp.report import page
from flyte_ddp.run import run_training
from flyte_ddp.core.training.checkpointing import Checkpointer
from training_runs import QUIET

data, tests, *moments = sys.argv[1:]
for moment in moments:
    if not os.fork():
        break
    os.wait()
else:
    sys.exit()
runs = Path(tests) / moment
runs.mkdir()
for number, name in ((1, "output"), (2, "errors")):
    os.dup2(os.open(f"{runs}.{name}", os.O_WRONLY | os.O_CREAT), number)
folder = runs / "run"

def make_read_only(path=folder):
    subprocess.run(["mount", "--bind", str(path), str(path)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(path)], check=True)

def before(function):
    def changed(*arguments, **options):
        make_read_only()
        return function(*arguments, **options)
    return changed

def after(function):
    def changed(*arguments, **options):
        function(*arguments, **options)
        make_read_only()
    return changed

def own_function():
    rank = current_rank()
    rank.record(1, loss=1.0)
    make_read_only()
    rank.save(1, {"step": 1})
    rank.load()
    return "something"

launch = single.launch
match moment:
    case "at the start":
        make_read_only(runs)
    case "as ranks begin":
        launch = before(launch)
    case "as agents begin":
        launch = before(agents.launch)
    case "at a checkpoint":
        Checkpointer.save_epoch = before(Checkpointer.save_epoch)
    case "at the report":
        launch = after(launch)
    case "at the end":
        page.write_html = after(page.write_html)
try:
    if moment == "in a function":
        run_ranks(own_function, num_ranks=1, folder=folder)
    else:
        run_training(Hyperparameters(epochs=1, max_steps=2, num_ranks=1), Path(data), folder, QUIET, launch=launch)
except Exception as error:
    print(type(error).__name__, error)
"""
READ_ONLY = "Read-only file system; "
FOLDER = "run folder RUNS/run: " + READ_ONLY + "it must be a writable folder: make it writable, or name another"
OTHER = "make its folder writable, or choose another "
MOMENTS = {
    "at the start": FOLDER,
    "as ranks begin": f"cannot write RUNS/run/unfinished/metrics.jsonl: {READ_ONLY}{OTHER}run folder",
    "as agents begin": FOLDER,
    "at a checkpoint": f"cannot write RUNS/run/unfinished/model.json: {READ_ONLY}{OTHER}folder",
    "at the report": f"cannot write RUNS/run/unfinished/report.html: {READ_ONLY}{OTHER}folder",
    "at the end": FOLDER,
    "in a function": f"cannot write RUNS/run/returned.pickle: {READ_ONLY}{OTHER}folder",
}


@pytest.mark.slow
def test_what_a_read_only_folder_says(digits: Path, tmp_path: Path) -> None:
    need_mounts(tmp_path)
    command = [*ALONE, "env", f"PYTHONPATH={HELPERS}", sys.executable, "-c", RUN, str(digits), str(tmp_path), *MOMENTS]
    subprocess.run(command, check=True)
    for moment, words in MOMENTS.items():
        runs = tmp_path / moment
        errors = Path(f"{runs}.errors").read_text()
        [said] = Path(f"{runs}.output").read_text().splitlines() or [errors]
        assert said.startswith(f"UserError {words}".replace("RUNS", str(runs))), moment
        saved = "checkpoint could not be written: cannot write"
        assert errors.count(saved) == (moment in ("at a checkpoint", "in a function")), moment
        assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.EROFS, "make its folder writable"),
        (errno.EACCES, "make its folder writable"),
        (errno.EDQUOT, "free some space"),
        (errno.ESTALE, "repair its disk or file server"),
    ],
)
def test_the_fix_depends_on_what_refuses(number: int, fix: str) -> None:
    reason = os.strerror(number)
    expected = f"^cannot write /a/b: {reason}; {fix}, or choose another folder$"
    with pytest.raises(UserError, match=expected), explain_write_errors(Path("/a/b")):
        raise OSError(number, reason)


def test_a_disk_that_fails_is_said() -> None:
    path = Path("/proc/self/mem")  # of which Linux says EIO, as of a file on a disk or a server that fails
    expected = f"cannot write {path}: Input/output error; repair its disk or file server"
    with pytest.raises(UserError, match=expected), explain_write_errors(path), path.open("r+b", buffering=0) as file:
        file.write(b"x")
