"""A store of checkpoints in a real S3 server, for each test a run of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from flytekit.configuration import DataConfig
from flytekit.core.data_persistence import FileAccessProvider
from s3_server import S3Server, s3_server

from tasks import checkpoint_store
from tasks.checkpoint_store import CheckpointStore


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
def store(server: S3Server, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointStore:
    """Of the first attempt of execution ``one``."""
    for name, value in server.flyte_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(checkpoint_store, "PAUSES", (0.0, 0.0))
    access = FileAccessProvider(str(tmp_path), "s3://bucket/data/xy/one-n1-0", DataConfig.auto())
    folder = f"s3://{base.relative_to(server.folder)}"
    return CheckpointStore(access.get_filesystem_for_path(folder), folder, execution="one", attempt=0)
