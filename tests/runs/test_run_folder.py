"""What is in a run folder is always of one run that came to its end, whatever ends the next one, and when."""

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli import HELPERS
from faulty_runs import nothing_like_a_result, saved
from interruptions import ended_before_each_change
from training_runs import QUIET

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core import results
from flyte_ddp.core.errors import StoppedError, UserError
from flyte_ddp.core.models import saving
from flyte_ddp.core.runs import checkpoint
from flyte_ddp.core.runs.run_folder import METRICS, OUTPUTS, UNFINISHED, is_finished, move_complete_run_into_place
from flyte_ddp.core.training import train
from flyte_ddp.report import page
from flyte_ddp.run import Result, run_training
from flyte_ddp.tracking import wandb_run

HP = Hyperparameters(model="user_models:handing_in", epochs=2, max_steps=4, batch_size=400, num_ranks=1)
FILES = (METRICS, *OUTPUTS)
ENTRIES = {*FILES, results.FOLDER}
pytestmark = pytest.mark.usefixtures("user_models")


@pytest.fixture(scope="module")
def finished(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(HELPERS)
        return run_training(HP, digits, tmp_path_factory.mktemp("finished") / "run", QUIET)


def contents(folder: Path) -> dict[str, bytes]:
    """All files but those of a run that is not finished."""
    files = [path for path in folder.rglob("*") if path.is_file() and UNFINISHED not in path.relative_to(folder).parts]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, action: Callable[[], object], *, after: bool) -> None:
    """Does something before, or after, the first call of a function."""
    function = getattr(owner, name)
    left = [action]

    def with_action(*args: Any, **kwargs: Any) -> Any:
        if left and not after:
            left.pop()()
        found = function(*args, **kwargs)
        if left:
            left.pop()()
        return found

    monkeypatch.setattr(owner, name, with_action)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_a_finished_run_stays_while_it_is_made_again(digits: Path, tmp_path, monkeypatch, finished: Result) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished.run_folder, folder)
    before = contents(folder)

    def look_and_end() -> None:
        assert contents(folder) == before, "while it trains"
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        once(patch, train, "evaluate_splits", look_and_end, after=True)
        with pytest.raises(StoppedError):
            run_training(HP, digits, folder, QUIET)
    assert contents(folder) == before, "when it has failed"
    assert {path.name for path in folder.iterdir()} == {*ENTRIES, UNFINISHED}
    went_on = run_training(HP, digits, folder, QUIET)
    assert {path.name for path in folder.iterdir()} == ENTRIES
    assert "resumed_after_step" in went_on.metrics.read_text()
    assert contents(folder)["model.pt"] == before["model.pt"]
    assert contents(folder)[METRICS] != before[METRICS]


@pytest.mark.parametrize("name", [METRICS, "a.ckpt", OUTPUTS[0]])
def test_a_full_disk_leaves_nothing_like_a_result_and_the_error_says_what_to_do(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, name: str
) -> None:
    open_path = Path.open

    def open_on_full_disk(path: Path, mode: str = "r", **options: Any) -> Any:
        replaces = name != METRICS and mode == "wb" and path.name.startswith(f".{name}.")
        full = replaces or (path.name, mode) == (name, "a+b")
        return open_path(Path("/dev/full") if full else path, mode, **options)

    monkeypatch.setattr(Path, "open", open_on_full_disk)
    words = f"cannot write .*{name}: No space left on device; free some space"
    if name == "a.ckpt":  # costs at most what a kill would lose, so it ends no run
        run_training(HP, digits, tmp_path / "run", QUIET)
        assert re.search(f"checkpoint could not be written: {words}", capfd.readouterr().err)
        return
    with pytest.raises(UserError, match=words):
        run_training(HP, digits, tmp_path / "run", QUIET)
    nothing_like_a_result(tmp_path / "run")


ENDS: dict[str, tuple[Any, str, bool]] = {
    "with a model": (saving, "save_model", True),
    "while it takes over": (Path, "replace", True),
    "when wandb has ended": (wandb_run, "print_to_stderr", False),
}


@pytest.fixture
def _pythons_own_handler() -> Iterator[None]:
    """flytekit, once another test has imported it, ends the process on Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# Ctrl-C may fall between open() and its with block, where Python itself leaves the file to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("_pythons_own_handler")
@pytest.mark.parametrize(
    ("moment", "again"),
    [
        ("with a model", True),
        ("while it takes over", True),
        pytest.param("when wandb has ended", False, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_at_the_end_leaves_results_or_a_checkpoint(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Result, moment: str, again: bool
) -> None:
    folder = tmp_path / "run"
    if again:
        shutil.copytree(finished.run_folder, folder)
    before = contents(folder)
    settings = replace(QUIET, wandb_mode="offline", wandb_timeout=1.0) if "wandb" in moment else QUIET
    owner, name, after = ENDS[moment]
    with monkeypatch.context() as patch:
        if owner is Path:  # the next file that is moved after the report is written
            once(patch, page, "write_html", lambda: once(patch, owner, name, interrupt, after=after), after=True)
        else:
            once(patch, owner, name, interrupt, after=after)
        with pytest.raises(KeyboardInterrupt):
            run_training(HP, digits, folder, settings)

    if moment in ("while it takes over", "when wandb has ended"):
        assert {path.name for path in folder.iterdir()} - {"wandb"} == ENTRIES, "by the run itself"
    if move_complete_run_into_place(folder) and contents(folder) != before:
        assert moment in ("while it takes over", "when wandb has ended")
    else:
        assert contents(folder) == before
        found = saved(folder)
        assert found is not None
        assert (found.step, found.epoch) == (4, 1)
        with monkeypatch.context() as patch:
            patch.setattr(train, "train_step", lambda *_: pytest.fail("a step was left"))
            run_training(HP, digits, folder, QUIET)
    assert {path.name for path in folder.iterdir()} - {"wandb"} == ENTRIES
    assert contents(folder)["model.pt"] == finished.model.read_bytes()
    assert contents(folder)[METRICS] != before.get(METRICS)


@pytest.mark.slow
def test_a_kill_while_it_takes_over_leaves_the_rest_to_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    work = folder / UNFINISHED
    (work / checkpoint.FOLDER).mkdir(parents=True)
    (work / checkpoint.FOLDER / "a.ckpt").touch()
    for place, content in ((work, "new"), (folder, "old")):
        (place / results.FOLDER).mkdir()
        for name in (*FILES, f"{results.FOLDER}/{content}"):
            (place / name).write_text(content)
    expected = {**dict.fromkeys(FILES, b"new"), f"{results.FOLDER}/new": b"new"}
    copies = 0
    for copy in ended_before_each_change(folder, move_complete_run_into_place):
        copies += 1
        assert is_finished(copy)
        assert move_complete_run_into_place(copy)
        assert contents(copy) == expected
        assert not [*(copy / UNFINISHED).glob("*")]
    assert copies > len(FILES)


def test_what_is_half_done_is_not_taken_over(tmp_path: Path) -> None:
    work = tmp_path / UNFINISHED
    work.mkdir()
    for name in (METRICS, *OUTPUTS[:-1]):
        (work / name).write_text("new")
    assert not move_complete_run_into_place(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [UNFINISHED]
