"""A pod that is told to stop because its files take more than its limit says so."""

import os
import signal
import tempfile
from pathlib import Path

import pytest
from flytekit import Resources, task
from flytekit.exceptions.user import FlyteRecoverableException

from flyte_ddp.pods import retries
from tasks.flyte import translate_errors_for_flyte


@task(limits=Resources(cpu="1", mem="1Gi", ephemeral_storage="1Mi"))
def fetch() -> None:
    """Writes into the pod's folder, and is told to stop."""


def stopped(folder: Path, size: int) -> str:
    """What Flyte is told of a pod that has written so many bytes when SIGTERM comes."""
    (folder / "data").mkdir()
    (folder / "data/file").write_bytes(b"x" * size)
    with pytest.raises(FlyteRecoverableException) as told, translate_errors_for_flyte():
        os.kill(os.getpid(), signal.SIGTERM)
    return str(told.value).removeprefix("USER:Recoverable: error=").removesuffix(", cause=")


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a pod of that task; its temporary folder is another one."""
    for name in ("root", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "root")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "f1")
    monkeypatch.setenv("FLYTE_INTERNAL_TASK_NAME", f"{__name__}.fetch")
    return tmp_path


@pytest.mark.parametrize("folder", ["root", "tmp"])
def test_more_files_than_the_limit(pod: Path, folder: str) -> None:
    assert stopped(pod / folder, 2**20 + 1) == (
        "stopped by SIGTERM; the same run will go on from its last checkpoint; its files take more than its 1Mi of "
        "disk (ephemeral-storage), so Kubernetes evicts it: take a profile with more (flyte_ddp/pods/profiles.py)"
    )


def test_another_reason_than_the_disk(pod: Path) -> None:
    said = "stopped by SIGTERM; the same run will go on from its last checkpoint"
    assert stopped(pod / "tmp", 2**19) == said


def test_a_pod_has_no_time_to_count_all_its_files(pod: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        (pod / f"tmp/{number}").mkdir()
        (pod / f"tmp/{number}/file").write_bytes(b"x" * 2**19)
    assert retries.exceed_disk_limit({pod / "tmp"}, 2**20)
    monkeypatch.setattr(retries, "COUNT_SECONDS", 0.0)
    assert not retries.exceed_disk_limit({pod / "tmp"}, 2**20)
