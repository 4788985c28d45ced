"""What outlives a pod: checkpoints in a real S3 server, whoever wrote them, and what Flyte is told of failures."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flytekit import FlyteContextManager
from flytekit.configuration import DataConfig
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.exceptions.user import FlyteRecoverableException
from kept_checkpoints import names, write
from processes import wait_until
from s3_server import S3Server

from flyte_ddp.errors import RankError, UnreachableError, UserError
from flyte_ddp.pods import retries
from flyte_ddp.pods.checkpoint_store import DONE, SAVED, STARTED, CheckpointStore
from flyte_ddp.runs import checkpoint
from flyte_ddp.runs.checkpoint import FOLDER, SLOTS
from flyte_ddp.runs.run_folder import UNFINISHED
from flyte_ddp.storage import ForbiddenError
from tasks import flyte


@pytest.mark.parametrize(
    ("prefix", "folder"),
    [
        ("s3://bucket/data/xy/f1-n1-0/", "s3://bucket/data/flyte-ddp-checkpoints"),
        ("s3://bucket/xy/f1-n1-0", "s3://bucket/flyte-ddp-checkpoints"),
        ("gs://bucket/deep/er/xy/f1-n1-0", "gs://bucket/deep/er/flyte-ddp-checkpoints"),
        ("abfs://container/data/xy/f1-n1-0", "az://container/data/flyte-ddp-checkpoints"),
        ("abfss://container@account.dfs.core.windows.net/xy/f1-n1-0", "az://container/flyte-ddp-checkpoints"),
    ],
)
def test_they_are_beside_all_outputs(prefix: str, folder: str) -> None:
    assert retries.checkpoints_address(prefix) == folder


class TestInAPod:
    """The whole way, as training tasks go it."""

    @pytest.fixture(autouse=True)
    def _in_a_pod(
        self, store: CheckpointStore, server: S3Server, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[None]:
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
        with flyte.translate_errors_for_flyte(), flyte.sync_checkpoints(folder / "run") as ranks_start:
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
            wait_until(lambda: names(project / "run") == ["one 0 4"])
            there.append(len(names(project / "another")))

        self.attempt(tmp_path / "0", save)
        assert there == [60]
        assert names(project / "another") == []

    def test_a_store_that_does_not_end_a_sweep_does_not_hold_the_result_up(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        never = threading.Event()
        monkeypatch.setattr(CheckpointStore, "delete_abandoned_files", lambda *_: never.wait(60))
        monkeypatch.setattr(retries, "SWEEP_SECONDS", 0.1)
        begin = time.monotonic()
        self.attempt(tmp_path / "0", lambda _: None)
        assert time.monotonic() - begin < 30
        never.set()

    def test_what_was_saved_last_is_sent(self, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(folder: Path) -> None:
            write(folder / SLOTS[0], 4)
            write(folder / SLOTS[1], 8)
            raise RankError("rank 1 was killed", recoverable=True)

        with pytest.raises(FlyteRecoverableException, match="rank 1 was killed"):
            self.attempt(tmp_path / "0", fail)
        monkeypatch.setenv("FLYTE_ATTEMPT_NUMBER", "1")
        found: list[int] = []

        def succeed(folder: Path) -> None:
            newest = checkpoint.find_newest_checkpoint(folder)
            found.append(newest.step if newest else 0)
            (folder / SLOTS[0]).unlink()

        self.attempt(tmp_path / "1", succeed)
        assert found == [8]
        assert names(base.parent / "p/d/run") == ["one 0 8"]
        assert names(base.parent / "p/d/run", DONE) == ["one 1 0"]

    def test_an_execution_from_scratch_takes_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        found: list[int] = []

        def look_and_be_lost(folder: Path) -> None:
            newest = checkpoint.find_newest_checkpoint(folder)
            found.append(newest.step if newest else 0)
            write(folder / SLOTS[0], 4)
            raise RankError("rank 1 was killed", recoverable=True)

        for execution, from_scratch in (("one", ""), ("two", ""), ("three", "yes")):
            monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", execution)
            monkeypatch.setenv("FLYTE_DDP_FROM_SCRATCH", from_scratch)
            with pytest.raises(FlyteRecoverableException):
                self.attempt(tmp_path / execution, look_and_be_lost)
        assert found == [0, 4, 0]

    def test_sigterm_while_they_are_fetched_loses_none(
        self, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begin = CheckpointStore.download_newest

        def begin_and_be_stopped(store: CheckpointStore, path: Path) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            begin(store, path)

        monkeypatch.setattr(CheckpointStore, "download_newest", begin_and_be_stopped)
        with pytest.raises(FlyteRecoverableException, match="will go on from its last checkpoint"):
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

        monkeypatch.setattr(CheckpointStore, "write_note", forbidden)
        monkeypatch.setattr(CheckpointStore, "upload_checkpoint", forbidden)
        self.attempt(tmp_path / "0", lambda folder: write(folder / SLOTS[0], 4))
        assert names(base.parent / "p/d/run") == []
        said = capsys.readouterr().out
        assert "without checkpoints there, a lost pod loses all that it has done" in said
        assert "checkpoint a.ckpt could not be sent: Access Denied; training continues" in said


def test_what_flyte_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "f1")
    with pytest.raises(FlyteRecoverableException, match="no answer"), flyte.translate_errors_for_flyte():
        raise UnreachableError("no answer")
    with pytest.raises(UserError, match="wrong"), flyte.translate_errors_for_flyte():
        raise UserError("wrong")
