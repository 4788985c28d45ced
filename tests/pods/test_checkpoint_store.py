"""Checkpoints of attempts and executions in a real S3 server."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kept_checkpoints import ARITHMETIC, IDENTITY, begun, names, write
from s3_server import S3Server

from flyte_ddp import storage
from flyte_ddp.core.errors import UnreachableError, UserError
from flyte_ddp.core.runs import checkpoint
from flyte_ddp.core.runs.checkpoint import SLOTS, Checkpoint
from flyte_ddp.pods import checkpoint_store
from flyte_ddp.pods.checkpoint_store import DONE, SAVED, STARTED, CheckpointStore, parse_run_file
from flyte_ddp.storage import ForbiddenError, UnavailableError


def test_an_attempt_resumes_from_the_newest_checkpoint_of_any_attempt(
    store: CheckpointStore, base: Path, tmp_path: Path
) -> None:
    """Also from that of a later attempt, if the pod of an earlier one is started again in its place."""
    assert begun(store, tmp_path / "0") == 0
    for step in (3, 5, 7):
        store.upload_checkpoint(write(tmp_path / "a.ckpt", step))
    assert names(base) == ["one 0 5", "one 0 7"]
    for attempt in (0, 1, 2):
        assert begun(replace(store, attempt=attempt), tmp_path / f"{attempt} again") == 7
    replace(store, attempt=2).upload_checkpoint(write(tmp_path / "a.ckpt", 9))
    assert names(base) == ["one 0 7", "one 2 9"]
    assert begun(replace(store, attempt=5), tmp_path / "5") == 9
    assert names(base, STARTED) == ["one 0 0", "one 0 7", "one 1 7", "one 2 7", "one 5 9"]


def test_a_newer_checkpoint_is_not_sent_by_an_older_ones_name(store: CheckpointStore, tmp_path, monkeypatch) -> None:
    path, read = write(tmp_path / "a.ckpt", 5), checkpoint.read_checkpoint

    def replace_when_read(found: Path, *, most_bytes: float) -> Checkpoint | None:
        header = read(found, most_bytes=most_bytes)
        write(path, 7)
        return header

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "read_checkpoint", replace_when_read)
        store.upload_checkpoint(path)
    assert begun(store, tmp_path / "0") == 5


def test_a_new_execution_resumes_where_one_without_a_result_stopped(
    store: CheckpointStore, base: Path, tmp_path: Path
) -> None:
    store.upload_checkpoint(write(tmp_path / "a.ckpt", 5))
    other = replace(store, execution="two")
    assert begun(other, tmp_path / "2") == 5
    other.upload_checkpoint(write(tmp_path / "a.ckpt", 6))
    assert names(base) == ["one 0 5", "two 0 6"], "each removes only its own"
    other.record_attempt_end(None)
    assert begun(replace(store, attempt=1), tmp_path / "1") == 5
    assert begun(replace(other, attempt=1), tmp_path / "2b") == 6, "it may be lost before it has handed its result over"
    assert begun(replace(store, execution="three", from_scratch=True), tmp_path / "3") == 0


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def make_newer(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"checkpoint/2 ", b"checkpoint/3 "))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut, "damaged: its content does not match its SHA-256"),
        (make_newer, "its format is flyte-ddp-checkpoint/3, and this release reads flyte-ddp-checkpoint/2"),
    ],
)
def test_an_unreadable_checkpoint_is_reported_and_does_not_count_as_none(
    store: CheckpointStore, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None], reason: str,
) -> None:  # fmt: skip
    for step in (3, 5):
        store.upload_checkpoint(write(tmp_path / "a.ckpt", step))
    [newest], [older] = base.rglob("saved-0-5-*"), base.rglob("saved-0-3-*")
    damage(newest)
    assert begun(replace(store, attempt=1), tmp_path / "1") == 3
    assert f"{newest.name} ({reason}) cannot be used; using the checkpoint of step 3" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "1").iterdir()) == [SLOTS[0]]
    damage(older)
    with pytest.raises(UserError, match="launch with --overwrite-cache or delete them") as caught:
        begun(replace(store, attempt=2), tmp_path / "2")
    assert not isinstance(caught.value, UnreachableError), "it would be tried again"
    for path in (newest, older):
        assert f"{path.name} ({reason})" in caught.value.message
    assert [*(tmp_path / "2").iterdir()] == []
    assert begun(replace(store, execution="two", from_scratch=True), tmp_path / "3") == 0


def test_a_checkpoint_that_is_forbidden_or_replaced_meanwhile_does_not_count_as_none(
    store: CheckpointStore, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another role encrypted it, or its attempt saves again."""
    store.upload_checkpoint(write(tmp_path / "a.ckpt", 3))
    open_file = storage.open_file

    def refuse(address: str) -> object:
        raise ForbiddenError("Access Denied")

    def replace_before(address: str) -> object:
        for path in base.rglob("saved-0-3-*"):
            path.unlink()
        return open_file(address)

    for opened, error, words in (
        (refuse, UserError, r"saved-0-3-0-\d+ \(Access Denied\)"),
        (replace_before, UnreachableError, "the next attempt will try again"),
    ):
        monkeypatch.setattr(storage, "open_file", opened)
        with pytest.raises(error, match=words):
            begun(replace(store, attempt=1), tmp_path / "1")


def test_abandoned_files_are_deleted(store: CheckpointStore, base: Path, tmp_path, monkeypatch) -> None:
    """An error of that is ignored, and keeps no others."""
    old, over, fresh = (base.parent / run / "execution" for run in ("old", "over", "fresh"))
    long_ago, lately = int(time.time()) - 15 * 86_400, int(time.time()) - 2 * 3600
    files = [(old, SAVED, long_ago), (over, DONE, lately), (over, SAVED, lately), (fresh, SAVED, lately)]
    for folder, kind, moment in files:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{kind}-0-1-0-{moment}").write_text("content")
    (old / "of somebody else").write_text("content")
    begun(store, tmp_path / "0")
    with monkeypatch.context() as patch:
        patch.setattr(storage, "list_files", lambda _: 1 / 0)
        store.delete_abandoned_files(seconds=30)
    assert (old / f"{SAVED}-0-1-0-{long_ago}").exists()
    refusals, delete_files = iter([ForbiddenError("Access Denied")]), storage.delete_files

    def refuse_once(addresses: Sequence[str]) -> None:
        if refusal := next(refusals, None):
            raise refusal
        delete_files(addresses)

    monkeypatch.setattr(checkpoint_store, "DELETE_BATCH", 1)
    monkeypatch.setattr(storage, "delete_files", refuse_once)
    for expected in ({"fresh", "old", "run"}, {"fresh", "run"}):
        store.delete_abandoned_files(seconds=30)
        left = {path.relative_to(base.parent).parts[0] for path in base.parent.rglob("*") if parse_run_file(str(path))}
        assert left == expected
    assert (old / "of somebody else").exists()


@pytest.mark.parametrize(("failures", "fails"), [(3, False), (4, True)])
def test_a_store_that_does_not_answer_is_asked_four_times(
    store: CheckpointStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    failures: int, fails: bool,
) -> None:  # fmt: skip
    store.upload_checkpoint(write(tmp_path / "a.ckpt", 5))
    errors, list_files = iter([UnavailableError("HTTP 503 SlowDown", transient=True)] * failures), storage.list_files

    def list_after_errors(folder: str) -> object:
        if error := next(errors, None):
            raise error
        return list_files(folder)

    monkeypatch.setattr(storage, "list_files", list_after_errors)
    if fails:
        with pytest.raises(UnreachableError, match="HTTP 503 SlowDown"):
            begun(store, tmp_path / "0")
    else:
        assert begun(store, tmp_path / "0") == 5
    assert capsys.readouterr().out.count("HTTP 503 SlowDown; next try") == 3


SENT_BYTES = 1 << 28
TRANSFER = """
import sys
from pathlib import Path
from flyte_ddp.pods.checkpoint_store import CheckpointStore

def peak_bytes():
    [line] = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

store, path = CheckpointStore(sys.argv[1], "one"), Path(sys.argv[2])
if sys.argv[3] == "upload":
    action = lambda: store.upload_checkpoint(path)
else:
    action = lambda: store.download_newest_checkpoint(path)
store.read_saved_steps("")  # opens the bucket
Path("/proc/self/clear_refs").write_text("5")
before = peak_bytes()
action()
print(peak_bytes() - before)
"""


def test_transfers_hold_a_small_part_of_a_file(tmp_path: Path, server: S3Server) -> None:
    new = Checkpoint(0, 1, (ARITHMETIC,), 5.0, IDENTITY, tmp_path / "a.ckpt", b"")
    checkpoint.write_checkpoint(new, {"weight": torch.ones(SENT_BYTES // 4)})
    (server.folder / "bucket").mkdir(exist_ok=True)
    environment = {**os.environ, **server.flyte_environment()}
    for what, path in (("upload", "a.ckpt"), ("download", "pod/a.ckpt")):
        command = [sys.executable, "-c", TRANSFER, "s3://bucket/streams", str(tmp_path / path), what]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert int(ended.stdout.splitlines()[-1]) < SENT_BYTES / 2, what
    assert (tmp_path / "pod/a.ckpt").read_bytes() == (tmp_path / "a.ckpt").read_bytes()
