"""What outlives a pod: checkpoints in a real S3 server, whoever wrote them, and what Flyte is told of failures."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import offspring_models
import pytest
from flytekit import FlyteContextManager
from flytekit.configuration import DataConfig
from flytekit.core.data_persistence import FileAccessProvider
from kept_checkpoints import begun, names, write
from s3_server import S3Server

from flyte_ddp import storage
from flyte_ddp.errors import RankError, UnreachableError, UserError
from flyte_ddp.pods.checkpoint_store import DONE, SAVED, STARTED, CheckpointStore, parse_entry
from flyte_ddp.runs import checkpoint
from flyte_ddp.runs.checkpoint import FOLDER, SLOTS
from flyte_ddp.runs.run_folder import UNFINISHED
from flyte_ddp.storage import ForbiddenError, UnavailableError
from tasks import places, recovery


def test_any_attempt_finds_the_newest(store: CheckpointStore, base: Path, tmp_path: Path) -> None:
    """However many attempts in between have left nothing."""
    assert begun(store, tmp_path / "0") == 0
    for step in (3, 5, 7):
        store.send(write(tmp_path / "a.ckpt", step))
    assert names(base) == ["one 0 5", "one 0 7"]
    assert begun(replace(store, attempt=1), tmp_path / "1") == 7
    third = replace(store, attempt=2)
    assert begun(third, tmp_path / "2") == 7
    third.send(write(tmp_path / "a.ckpt", 9))
    assert names(base) == ["one 0 7", "one 2 9"]
    assert begun(replace(store, attempt=5), tmp_path / "5") == 9
    assert names(base, STARTED) == ["one 0 0", "one 1 7", "one 2 7", "one 5 9"]


@pytest.mark.parametrize("order", [*itertools.product(("before", "during", "after"), repeat=3)], ids="-".join)
def test_the_newest_is_found_whenever_attempts_were_killed(
    store: CheckpointStore, tmp_path: Path, order: tuple[str, ...]
) -> None:
    """Before their ranks met, while they did, or after, with five steps more."""
    steps = 0
    for attempt, killed in enumerate(order):
        own = replace(store, attempt=attempt)
        if killed != "before":
            assert begun(own, tmp_path / str(attempt)) == steps
        if killed == "after":
            steps += 5
            own.send(write(tmp_path / "a.ckpt", steps))
    assert begun(replace(store, attempt=len(order)), tmp_path / "last") == steps


@pytest.mark.parametrize(("here", "elsewhere"), [(5, 7), (9, 7), (7, 7)])
def test_ranks_that_an_engine_starts_again_go_on_from_the_newest(
    store: CheckpointStore, tmp_path: Path, here: int, elsewhere: int
) -> None:
    """Which rank 0 on another host may have left, or an earlier one on this host."""
    store.send(write(tmp_path / "elsewhere/a.ckpt", elsewhere))
    for name in SLOTS:
        write(tmp_path / "here" / name, here)
    assert begun(store, tmp_path / "here") == max(here, elsewhere)


def test_an_attempt_that_got_further_before_it_was_started_again_in_its_place_counts(
    store: CheckpointStore, tmp_path: Path
) -> None:
    begun(store, tmp_path / "0")
    store.send(write(tmp_path / "a.ckpt", 5))
    for attempt in (0, 1, 2):
        assert begun(replace(store, attempt=attempt), tmp_path / f"{attempt} again") == 5


def test_a_new_execution_goes_on_where_the_last_one_stopped(store: CheckpointStore, base: Path, tmp_path: Path) -> None:
    store.send(write(tmp_path / "a.ckpt", 5))
    other = replace(store, execution="two")
    assert begun(other, tmp_path / "2") == 5
    other.send(write(tmp_path / "a.ckpt", 6))
    assert names(base) == ["one 0 5", "two 0 6"], "each removes only its own"
    other.end(None)
    assert begun(replace(store, attempt=1), tmp_path / "1") == 5, "of one that is done nothing is taken"
    assert begun(replace(other, attempt=1), tmp_path / "2b") == 6, "unless it is lost before it has handed over"
    assert begun(replace(store, execution="three", from_scratch=True), tmp_path / "3") == 0


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def make_newer(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"checkpoint/1 ", b"checkpoint/2 "))


DAMAGE: dict[Callable[[Path], None], str] = {
    cut: "damaged: its content does not match its SHA-256",
    make_newer: "its format is flyte-ddp-checkpoint/2, and this release reads flyte-ddp-checkpoint/1",
}
each_damage = pytest.mark.parametrize(("damage", "reason"), DAMAGE.items(), ids=["cut", "newer"])


@each_damage
def test_one_that_cannot_be_read_beside_a_good_one_is_said(
    store: CheckpointStore,
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    reason: str,
) -> None:
    for step in (3, 5):
        store.send(write(tmp_path / "a.ckpt", step))
    [newest] = base.rglob("saved-0-5-*")
    damage(newest)
    assert begun(replace(store, attempt=1), tmp_path / "1") == 3
    assert f"{newest.name} ({reason}) cannot be used; that of step 3 is" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "1").iterdir()) == [SLOTS[0]]


@each_damage
def test_where_none_can_be_read_no_attempt_begins_anew(
    store: CheckpointStore, base: Path, tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    for step in (3, 5):
        store.send(write(tmp_path / "a.ckpt", step))
    damaged = [*base.rglob("saved-*")]
    for path in damaged:
        damage(path)
    with pytest.raises(UserError, match="launch with --overwrite-cache or delete them") as caught:
        begun(replace(store, attempt=1), tmp_path / "1")
    assert not isinstance(caught.value, UnreachableError), "it would be tried again"
    for path in damaged:
        assert f"{path.name} ({reason})" in caught.value.message
    assert [*(tmp_path / "1").iterdir()] == []
    assert begun(replace(store, execution="two", from_scratch=True), tmp_path / "2") == 0
    for path in damaged:
        path.unlink()
    assert begun(replace(store, attempt=1), tmp_path / "1") == 0


def test_one_that_may_not_be_read_is_not_taken_for_none(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another role encrypted it."""
    store.send(write(tmp_path / "a.ckpt", 3))

    def forbidden(*_: object) -> None:
        raise ForbiddenError("Access Denied")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "open_file", forbidden)
        with pytest.raises(UserError, match=r"saved-0-3-0-\d+ \(Access Denied\)"):
            begun(replace(store, attempt=1), tmp_path / "1")
    assert begun(replace(store, attempt=1), tmp_path / "1") == 3


def test_one_that_is_replaced_while_it_is_fetched_is_not_taken_for_none(
    store: CheckpointStore, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.send(write(tmp_path / "a.ckpt", 3))
    fetch = storage.open_file

    def replaced_before(address: str) -> object:
        for path in base.rglob("saved-0-3-*"):
            path.unlink()
        return fetch(address)

    monkeypatch.setattr(storage, "open_file", replaced_before)
    with pytest.raises(UnreachableError, match="the same run will try again"):
        begun(replace(store, attempt=1), tmp_path / "1")


def test_two_at_once_do_not_mix(store: CheckpointStore, base: Path, tmp_path: Path) -> None:
    def train(execution: str) -> None:
        own = replace(store, execution=execution)
        for step in range(1, 20):
            own.send(write(tmp_path / execution / "a.ckpt", step))

    threads = [threading.Thread(target=train, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names(base) == ["one 0 18", "one 0 19", "two 0 18", "two 0 19"]


def test_what_is_nobodys_is_removed(store: CheckpointStore, base: Path, tmp_path: Path) -> None:
    old, over, fresh = (base.parent / run / "execution" for run in ("old", "over", "fresh"))
    long_ago, lately = int(time.time()) - 15 * 86_400, int(time.time()) - 2 * 3600
    for folder, kind, moment in (
        (old, SAVED, long_ago),
        (over, DONE, lately),
        (over, SAVED, lately),
        (fresh, SAVED, lately),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{kind}-0-1-0-{moment}").write_text("content")
    (old / "of somebody else").write_text("content")
    begun(store, tmp_path / "0")
    store.sweep()
    left = {path.relative_to(base.parent).parts[0] for path in base.parent.rglob("*") if parse_entry(str(path))}
    assert left == {"fresh", "run"}
    assert (old / "of somebody else").exists()


@pytest.mark.parametrize(("failures", "fails"), [(3, False), (4, True)])
def test_a_store_that_fails_is_asked_again(
    store: CheckpointStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    failures: int, fails: bool,
) -> None:  # fmt: skip
    store.send(write(tmp_path / "a.ckpt", 5))
    errors, list_files = iter([UnavailableError("HTTP 503 SlowDown", transient=True)] * failures), storage.list_files

    def troubled(folder: str) -> object:
        if error := next(errors, None):
            raise error
        return list_files(folder)

    monkeypatch.setattr(storage, "list_files", troubled)
    if fails:
        with pytest.raises(UnreachableError, match="HTTP 503 SlowDown"):
            begun(store, tmp_path / "0")
    else:
        assert begun(store, tmp_path / "0") == 5
    assert capsys.readouterr().out.count("HTTP 503 SlowDown; next try") == 3


@pytest.mark.parametrize(
    ("prefix", "folder"),
    [
        ("s3://bucket/data/xy/f1-n1-0/", "s3://bucket/data/flyte-ddp-checkpoints"),
        ("s3://bucket/xy/f1-n1-0", "s3://bucket/flyte-ddp-checkpoints"),
        ("gs://bucket/deep/er/xy/f1-n1-0", "gs://bucket/deep/er/flyte-ddp-checkpoints"),
    ],
)
def test_they_are_beside_all_outputs(prefix: str, folder: str) -> None:
    assert recovery.beside_outputs(prefix) == folder


class TestInAPod:
    """The whole way, as training tasks go it."""

    @pytest.fixture(autouse=True)
    def _in_a_pod(
        self, store: CheckpointStore, server: S3Server, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[None]:
        monkeypatch.setattr(places, "is_local", lambda: False)
        address = f"s3://{base.parent.relative_to(server.folder)}"
        variables = {"PROJECT": "p", "DOMAIN": "d", "ID": "one"}
        for name, value in variables.items():
            monkeypatch.setenv(f"FLYTE_INTERNAL_EXECUTION_{name}", value)
        monkeypatch.setenv("FLYTE_DDP_CHECKPOINTS", address)
        monkeypatch.setenv("FLYTE_ATTEMPT_NUMBER", "0")
        access = FileAccessProvider(str(tmp_path), "s3://bucket/data/xy/one-n1-0", DataConfig.auto())
        with FlyteContextManager.with_context(FlyteContextManager.current_context().with_file_access(access)):
            yield

    @staticmethod
    def attempt(folder: Path, work: Callable[[Path], object]) -> None:
        with recovery.guarded(), recovery.checkpoints_kept(folder / "run") as ranks_start:
            ranks_start()
            work(folder / "run" / UNFINISHED / FOLDER)

    def test_checkpoints_are_sent_before_old_files_are_removed(self, base: Path, tmp_path: Path) -> None:
        """Which is done at the end, by few requests."""
        abandoned, project = base.parent / "p/d/another/execution", base.parent / "p/d"
        abandoned.mkdir(parents=True)
        for number in range(60):
            (abandoned / f"{SAVED}-0-{number}-0-{int(time.time()) - 15 * 86_400}").write_text("content")
        there: list[int] = []

        def save(folder: Path) -> None:
            write(folder / SLOTS[0], 4)
            offspring_models.wait(lambda: names(project / "run") == ["one 0 4"])
            there.append(len(names(project / "another")))

        self.attempt(tmp_path / "0", save)
        assert there == [60]
        assert names(project / "another") == []

    def test_a_store_that_does_not_end_a_sweep_does_not_hold_the_result_up(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        never = threading.Event()
        monkeypatch.setattr(CheckpointStore, "sweep", lambda *_: never.wait(60))
        monkeypatch.setattr(recovery, "SWEEP_SECONDS", 0.1)
        begin = time.monotonic()
        self.attempt(tmp_path / "0", lambda _: None)
        assert time.monotonic() - begin < 30
        never.set()

    def test_what_was_saved_last_is_sent(self, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(folder: Path) -> None:
            write(folder / SLOTS[0], 4)
            write(folder / SLOTS[1], 8)
            raise RankError("rank 1 was killed", recoverable=True)

        with pytest.raises(recovery.FlyteRecoverableException, match="rank 1 was killed"):
            self.attempt(tmp_path / "0", fail)
        monkeypatch.setenv("FLYTE_ATTEMPT_NUMBER", "1")
        found: list[int] = []

        def succeed(folder: Path) -> None:
            newest = checkpoint.newest_of(folder)
            found.append(newest.step if newest else 0)
            (folder / SLOTS[0]).unlink()

        self.attempt(tmp_path / "1", succeed)
        assert found == [8]
        assert names(base.parent / "p/d/run") == ["one 0 8"]
        assert names(base.parent / "p/d/run", DONE) == ["one 1 0"]

    def test_an_execution_from_scratch_takes_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        found: list[int] = []

        def look_and_be_lost(folder: Path) -> None:
            newest = checkpoint.newest_of(folder)
            found.append(newest.step if newest else 0)
            write(folder / SLOTS[0], 4)
            raise RankError("rank 1 was killed", recoverable=True)

        for execution, from_scratch in (("one", ""), ("two", ""), ("three", "yes")):
            monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", execution)
            monkeypatch.setenv("FLYTE_DDP_FROM_SCRATCH", from_scratch)
            with pytest.raises(recovery.FlyteRecoverableException):
                self.attempt(tmp_path / execution, look_and_be_lost)
        assert found == [0, 4, 0]

    def test_sigterm_while_they_are_fetched_loses_none(
        self, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begin = CheckpointStore.begin

        def begin_and_be_stopped(store: CheckpointStore, path: Path) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            begin(store, path)

        monkeypatch.setattr(CheckpointStore, "begin", begin_and_be_stopped)
        with pytest.raises(recovery.FlyteRecoverableException, match="will go on from its last checkpoint"):
            self.attempt(tmp_path / "0", lambda _: None)
        assert names(base.parent / "p/d/run", STARTED) == []

    def test_a_store_that_may_not_be_read_is_not_taken_for_an_empty_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FLYTE_AWS_SECRET_ACCESS_KEY", "wrong")
        access = FileAccessProvider(str(tmp_path), "s3://bucket/data/xy/one-n1-0", DataConfig.auto())
        done: list[Path] = []
        with (
            FlyteContextManager.with_context(FlyteContextManager.current_context().with_file_access(access)),
            pytest.raises(UserError, match="whether there is a checkpoint is not known: allow pods to list, read and"),
        ):
            self.attempt(tmp_path / "0", done.append)
        assert done == []

    def test_a_store_that_may_not_be_written_to_loses_what_comes(
        self, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def forbidden(*_: object) -> None:
            raise ForbiddenError("Access Denied")

        monkeypatch.setattr(CheckpointStore, "note", forbidden)
        monkeypatch.setattr(CheckpointStore, "send", forbidden)
        self.attempt(tmp_path / "0", lambda folder: write(folder / SLOTS[0], 4))
        assert names(base.parent / "p/d/run") == []
        said = capsys.readouterr().out
        assert "without checkpoints there, a lost pod loses all that it has done" in said
        assert "checkpoint a.ckpt could not be sent: Access Denied; training continues" in said


def test_what_flyte_tries_again() -> None:
    with pytest.raises(recovery.FlyteRecoverableException, match="no answer"), recovery.guarded():
        raise UnreachableError("no answer")
    with pytest.raises(UserError, match="wrong"), recovery.guarded():
        raise UserError("wrong")
