"""What outlives a pod: checkpoints in a real S3 server; and what Flyte is told of failures."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from flytekit import FlyteContextManager
from flytekit.configuration import DataConfig
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.exceptions.user import FlyteRecoverableException
from kept_checkpoints import names, write
from processes import wait_until
from s3_server import S3Server

from flyte_ddp.core.errors import RankError, UnreachableError, UserError
from flyte_ddp.core.runs import checkpoint
from flyte_ddp.core.runs.checkpoint import FOLDER, SLOTS
from flyte_ddp.core.runs.run_folder import UNFINISHED
from flyte_ddp.pods import retries
from flyte_ddp.pods.checkpoint_store import DONE, SAVED, STARTED, CheckpointStore
from flyte_ddp.storage import ForbiddenError
from tasks.flyte import PLATFORM, translate_errors_for_flyte


@pytest.mark.parametrize(
    ("prefix", "folder"),
    [
        ("s3://bucket/data/xy/f1-n1-0/", "s3://bucket/data/flyte-ddp-checkpoints"),
        ("gs://bucket/deep/er/xy/f1-n1-0", "gs://bucket/deep/er/flyte-ddp-checkpoints"),
        ("abfss://container@account.dfs.core.windows.net/xy/f1-n1-0", "az://container/flyte-ddp-checkpoints"),
    ],
)
def test_checkpoints_are_beside_all_outputs(prefix: str, folder: str) -> None:
    assert retries.read_checkpoints_address(prefix) == folder


def pod_context(folder: Path) -> Any:
    """Return flytekit's context of a pod, with the credentials that are in the environment now."""
    access = FileAccessProvider(str(folder), "s3://bucket/data/xy/one-n1-0", DataConfig.auto())
    return FlyteContextManager.with_context(FlyteContextManager.current_context().with_file_access(access))


class TestInAPod:
    """The whole way, as training tasks go it."""

    @pytest.fixture(autouse=True)
    def project(self, store: CheckpointStore, server: S3Server, base: Path, tmp_path, monkeypatch) -> Iterator[Path]:
        """A pod's surroundings, and the folder of the project's checkpoints on the server."""
        for name, value in {"PROJECT": "p", "DOMAIN": "d", "ID": "one"}.items():
            monkeypatch.setenv(f"FLYTE_INTERNAL_EXECUTION_{name}", value)
        monkeypatch.setenv("FLYTE_DDP_CHECKPOINTS", f"s3://{base.parent.relative_to(server.folder)}")
        monkeypatch.setenv("FLYTE_ATTEMPT_NUMBER", "0")
        with pod_context(tmp_path):
            yield base.parent / "p/d"

    @staticmethod
    def attempt(folder: Path, work: Callable[[Path], object]) -> None:
        with (
            translate_errors_for_flyte(),
            retries.sync_checkpoints_with_store(
                PLATFORM, folder / "run", folder / "run" / UNFINISHED
            ) as record_start_and_read_settings,
        ):
            record_start_and_read_settings()
            work(folder / "run" / UNFINISHED / FOLDER)

    @staticmethod
    def newest_step(folder: Path) -> int:
        newest = checkpoint.find_newest_checkpoint(folder)[0]
        return newest.step if newest else 0

    def test_checkpoints_are_sent_before_old_files_are_deleted(self, project: Path, tmp_path: Path) -> None:
        """Which is done at the end."""
        abandoned = project / "another/execution"
        abandoned.mkdir(parents=True)
        (abandoned / f"{SAVED}-0-1-0-{int(time.time()) - 15 * 86_400}").write_text("content")

        def save(folder: Path) -> None:
            write(folder / SLOTS[0], 4)
            wait_until(lambda: names(project / "run") == ["one 0 4"])
            assert len(names(project / "another")) == 1

        self.attempt(tmp_path / "0", save)
        assert names(project / "another") == []

    def test_the_last_checkpoint_is_sent(self, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(folder: Path) -> None:
            write(folder / SLOTS[0], 4)
            write(folder / SLOTS[1], 8)
            raise RankError("rank 1 was killed", recoverable=True)

        def succeed(folder: Path) -> None:
            assert self.newest_step(folder) == 8
            (folder / SLOTS[0]).unlink()

        with pytest.raises(FlyteRecoverableException, match="rank 1 was killed\n\nthe same run will go on"):
            self.attempt(tmp_path / "0", fail)
        monkeypatch.setenv("FLYTE_ATTEMPT_NUMBER", "1")
        self.attempt(tmp_path / "1", succeed)
        assert names(project / "run") == ["one 0 8"]
        assert names(project / "run", DONE) == ["one 1 0"]

    def test_a_result_counts_when_its_outputs_are_written(self, project: Path, tmp_path: Path) -> None:
        """Another attempt goes on from the last save if they could not be."""
        waiting: list[Callable[[], None]] = []
        attempt = partial(retries.sync_checkpoints_with_store, PLATFORM, tmp_path / "run", defer=waiting.append)
        with attempt(tmp_path / "0") as record_start_and_read_settings:
            record_start_and_read_settings()
            write(tmp_path / "0" / FOLDER / SLOTS[0], 4)
        assert (names(project / "run"), names(project / "run", DONE)) == (["one 0 4"], [])
        with attempt(tmp_path / "1"):
            assert self.newest_step(tmp_path / "1" / FOLDER) == 4
        waiting[-1]()
        assert names(project / "run", DONE) == ["one 0 0"]

    def test_sigterm_during_the_download_loses_no_checkpoint(self, project: Path, tmp_path, monkeypatch) -> None:
        download = CheckpointStore.download_newest_checkpoint

        def stop_and_download(store: CheckpointStore, path: Path) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            download(store, path)

        monkeypatch.setattr(CheckpointStore, "download_newest_checkpoint", stop_and_download)
        with pytest.raises(FlyteRecoverableException, match="will go on from its last checkpoint"):
            self.attempt(tmp_path / "0", lambda _: None)
        assert names(project / "run", STARTED) == []

    def test_a_store_that_may_not_be_read_is_not_taken_for_an_empty_one(self, tmp_path, monkeypatch) -> None:
        monkeypatch.setenv("FLYTE_AWS_SECRET_ACCESS_KEY", "wrong")
        with (
            pod_context(tmp_path),
            pytest.raises(UserError, match="whether a checkpoint exists; allow pods to list, read and"),
        ):
            self.attempt(tmp_path / "0", lambda _: pytest.fail("it began"))

    def test_a_run_continues_if_the_store_may_not_be_written_to(
        self, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def forbid(*_: object, **__: object) -> None:
            raise ForbiddenError("Access Denied")

        monkeypatch.setattr(CheckpointStore, "write_note", forbid)
        monkeypatch.setattr(CheckpointStore, "upload_checkpoint", forbid)
        self.attempt(tmp_path / "0", lambda folder: write(folder / SLOTS[0], 4))
        assert names(project / "run") == []
        said = capsys.readouterr().out
        assert "without checkpoints there, a lost pod loses all its progress" in said
        assert "checkpoint a.ckpt could not be uploaded: Access Denied; training continues" in said


def test_what_flyte_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "f1")
    with pytest.raises(FlyteRecoverableException, match="no answer"), translate_errors_for_flyte():
        raise UnreachableError("no answer")
    with pytest.raises(UserError, match="wrong"), translate_errors_for_flyte():
        raise UserError("wrong")
