"""Checkpoints that are there and cannot be read end a run before it has changed anything; one of two is enough."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kept_checkpoints import IDENTITY, write, write_head
from training_runs import QUIET

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core import results
from flyte_ddp.core.errors import RankError, UserError
from flyte_ddp.core.launch.remote.rendezvous import rewind_work
from flyte_ddp.core.machine.resources import Request
from flyte_ddp.core.runs import checkpoint
from flyte_ddp.core.runs.checkpoint import FOLDER, SLOTS, Identity
from flyte_ddp.core.runs.run_folder import METRICS, UNFINISHED, complete_error, rewind_to_newest_checkpoint
from flyte_ddp.core.runs.work import Work
from flyte_ddp.run import run_training

NOBODY = 65534


@pytest.fixture
def work() -> Iterator[Path]:
    """The unfinished/ of a run that was cut off after step 2, where also others than root may look."""
    with tempfile.TemporaryDirectory() as temporary:
        Path(temporary).chmod(0o755)
        folder = Path(temporary) / "run" / UNFINISHED
        for step, name in enumerate(SLOTS, 1):
            write(folder / FOLDER / name, step, b"of step 2\n")
        (folder / METRICS).write_text("of step 2\nof step 3, which no checkpoint holds\n")
        (folder / results.FOLDER).mkdir()
        (folder / results.FOLDER / "scores.csv").write_text("handed in\n")
        yield folder


def contents(folder: Path) -> dict[str, bytes]:
    """Of all files but the checkpoints."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != FOLDER]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def flip_a_bit(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def add_a_field(path: Path) -> None:
    with path.open("rb") as file:
        header, metrics = checkpoint.read_head(file, with_metrics=True)
    write_head(path, json.dumps({**header, "phase": "full"}).encode() + b"\n" + metrics)


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def rewriting(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: rewrite(path, change)


def put_on_a_bad_disk(path: Path) -> None:
    path.unlink()
    path.symlink_to("/proc/self/mem")  # of which Linux says EIO, as of a file on a disk or a server that fails


cut = rewriting(lambda content: content[:-1])
DAMAGED = "damaged: its content does not match its SHA-256"
OTHER_FORMAT = "its format is flyte-ddp-checkpoint/12, and this release reads flyte-ddp-checkpoint/2"
FIRST_FORMAT = OTHER_FORMAT.replace("/12", "/1")
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit": (rewriting(flip_a_bit), DAMAGED),
    "newer": (rewriting(lambda content: content.replace(b"/2 ", b"/12 ", 1)), OTHER_FORMAT),
    "of the first release": (lambda path: path.write_bytes(b"flyte-ddp-checkpoint/1 0\n"), FIRST_FORMAT),
    "newer, of the same format": (add_a_field, "its header is from another release"),
    "on a bad disk": (put_on_a_bad_disk, "Input/output error"),
    "another user's": (lambda path: path.chmod(0), "Permission denied"),
}


def loaded(work: Path, run: Identity = IDENTITY) -> checkpoint.Checkpoint | None:
    """What a run finds; not as root, whom permissions do not stop, where there are files that nobody may read."""
    user = os.geteuid()
    forbidden = any(path.exists() and path.stat().st_mode & 0o777 == 0 for path in (work / FOLDER).iterdir())
    if forbidden and user == 0:
        for path in (work, *work.rglob("*")):
            os.chown(path, NOBODY, -1)
        os.seteuid(NOBODY)
    try:
        return rewind_to_newest_checkpoint(work, run)
    finally:
        os.seteuid(user)


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_one_that_cannot_be_read_is_said_and_two_are_refused_and_nothing_is_lost(
    work: Path, damage: Callable[[Path], None], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (work / FOLDER / name for name in SLOTS)
    damage(second)
    before = contents(work)
    found = loaded(work)
    assert found is not None
    assert (found.step, found.path) == (1, first)
    assert f"{second} ({reason}) cannot be used; using {SLOTS[0]} of step 1" in capsys.readouterr().err
    assert contents(work) == {**before, METRICS: b"of step 2\n"}
    damage(first)
    with pytest.raises(UserError, match="delete them to restart from scratch") as caught:
        loaded(work)
    for path in (first, second):
        assert f"{path} ({reason})" in caught.value.message
    assert contents(work) == {**before, METRICS: b"of step 2\n"}


def test_without_any_the_run_begins_anew(work: Path) -> None:
    """A file that was being written when the run was killed is none."""
    shutil.rmtree(work / FOLDER)
    (work / FOLDER).mkdir()
    (work / FOLDER / f".{SLOTS[0]}.4711.tmp").write_bytes(b"half of it")
    assert loaded(work) is None
    assert (work / METRICS).read_text() == ""
    assert not (work / results.FOLDER).exists()
    error = RankError("rank 1 was killed by SIGKILL", recoverable=True)
    complete_error(error, work)
    assert "will restart from scratch, as no checkpoint exists yet" in error.format_message()


def test_a_single_one_that_cannot_be_read_is_refused_where_an_engine_starts_ranks_again(work: Path) -> None:
    """And no error says that there is none."""
    (work / FOLDER / SLOTS[0]).unlink()
    cut(work / FOLDER / SLOTS[1])
    lost = Work("", None, Request(1), work, IDENTITY, QUIET)
    with pytest.raises(UserError, match=r"damaged.*delete them to restart from scratch"):
        rewind_work(lost, "a host is lost")
    error = RankError("rank 1 was killed by SIGKILL", recoverable=True)
    complete_error(error, work)
    assert "no checkpoint exists" not in error.format_message()


def test_the_newest_step_is_that_which_the_next_run_goes_on_from(work: Path) -> None:
    assert checkpoint.find_newest_step(work) == 2
    rewrite(work / FOLDER / SLOTS[1], flip_a_bit)
    assert checkpoint.find_newest_step(work) == 1
    found = loaded(work)
    assert found is not None
    assert found.step == 1
    (work / FOLDER / SLOTS[1]).write_bytes(b"not a checkpoint")
    assert checkpoint.find_newest_step(work) == 1


def test_the_newest_step_of_large_checkpoints_is_known_at_once(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gigabytes take longer to verify than a run that is asked to end has."""
    monkeypatch.setattr(checkpoint, "QUICK_BYTES", 100)
    monkeypatch.setattr(checkpoint, "check_file_digest", None)
    assert checkpoint.find_newest_step(work) == 2
    cut(work / FOLDER / SLOTS[1])
    assert checkpoint.find_newest_step(work) == 1


@pytest.mark.parametrize("first", SLOTS)
def test_of_two_saves_of_a_step_the_later_one_is_loaded(tmp_path: Path, first: str) -> None:
    """A user's function may save a step again, such as after its evaluation."""
    newest = write(tmp_path / FOLDER / first, 5) if first != SLOTS[0] else None
    for metrics in (b"earlier\n", b"later\n"):
        newest = write(checkpoint.choose_next_slot(tmp_path / FOLDER, newest), 5, metrics)
    found = rewind_to_newest_checkpoint(tmp_path, IDENTITY)
    assert found is not None
    assert found.path == newest
    assert (tmp_path / METRICS).read_bytes() == b"later\n"


def test_a_run_that_is_refused_changes_nothing(digits: Path, work: Path) -> None:
    for name in SLOTS:
        rewrite(work / FOLDER / name, flip_a_bit)
    before = contents(work.parent)
    with pytest.raises(UserError, match="restart from scratch"):
        run_training(Hyperparameters(num_ranks=1, max_steps=1), digits, work.parent, QUIET)
    assert contents(work.parent) == before
