"""A store of checkpoints in a real S3 server, for each test a run of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_server import S3Server, s3_server

from flyte_ddp.pods.checkpoint_store import CheckpointStore
from flyte_ddp.storage import retries


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    folder = tmp_path_factory.mktemp("s3")
    (folder / "bucket").mkdir()
    with s3_server(folder) as started:
        yield started


@pytest.fixture
def base(server: S3Server, request: pytest.FixtureRequest) -> Path:
    """The folder of a run in the bucket, of this test's own."""
    return server.folder / "bucket" / request.node.name.translate(str.maketrans("[]", "--")) / "run"


@pytest.fixture
def store(server: S3Server, base: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointStore:
    """Of the first attempt of execution ``one``."""
    for name, value in server.flyte_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(retries, "FIRST_DELAY", 0.0)
    return CheckpointStore(f"s3://{base.relative_to(server.folder)}", "one")
