"""Write and list checkpoints in a blob store, as attempts of executions do."""

import hashlib
import io
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from s3_server import S3Server, s3_server

from flyte_ddp.core.runs import checkpoint
from flyte_ddp.core.runs.checkpoint import COMMENT_BYTES, FORMAT, HEAD, SLOTS, Arithmetic, Checkpoint, Identity
from flyte_ddp.pods.checkpoint_store import SAVED, CheckpointStore, parse_run_file
from flyte_ddp.storage import transfer

IDENTITY = Identity({"epochs": 1}, data="d", code="c", user_code="", initial_weights="", releases="torch 2")
ARITHMETIC = Arithmetic(1, "cpu", "fp32", 1, "off", "")


def write(path: Path, step: int, metrics: bytes = b"") -> Path:
    """Write a checkpoint as training does, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = Checkpoint(0, step, (ARITHMETIC,), time.time(), IDENTITY, path, metrics)
    checkpoint.write_checkpoint(new, {"step": step})
    return path


def write_head(path: Path, head: bytes) -> None:
    """Write an intact checkpoint with another head, without a state."""
    content = io.BytesIO()
    torch.save({HEAD: torch.frombuffer(bytearray(head), dtype=torch.uint8)}, content)
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    path.write_bytes(content.getvalue()[:-2] + bytes([COMMENT_BYTES, 0]) + f"{FORMAT} {digest}".encode())


def begun(store: CheckpointStore, folder: Path) -> int:
    """Begin an attempt and report the start. Return the step after which the attempt resumes."""
    folder.mkdir(parents=True, exist_ok=True)
    found = store.download_newest_checkpoint(folder / SLOTS[0])
    step = found.step if found else 0
    store.record_attempt_start(step)
    assert found == checkpoint.find_newest_checkpoint(folder)[0]
    return step


def names(base: Path, kind: str = SAVED) -> list[str]:
    """Return execution, attempt and step of each file of a kind."""
    files = [file for path in base.rglob("*") if (file := parse_run_file(str(path))) is not None]
    return sorted(f"{file.execution} {file.attempt} {file.step}" for file in files if file.kind == kind)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    folder = tmp_path_factory.mktemp("s3")
    (folder / "bucket").mkdir()
    with s3_server(folder) as started:
        yield started


@pytest.fixture
def base(server: S3Server, request: pytest.FixtureRequest) -> Path:
    """Return the folder in the bucket for the run of this test."""
    return server.folder / "bucket" / request.node.name.translate(str.maketrans("[]", "--")) / "run"


@pytest.fixture
def store(server: S3Server, base: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointStore:
    """Return the store of the first attempt of execution ``one``."""
    for name, value in server.flyte_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(transfer, "FIRST_DELAY", 0.0)
    return CheckpointStore(f"s3://{base.relative_to(server.folder)}", "one")
