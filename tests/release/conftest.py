"""Registries, in a folder and on an S3 server that knows conditional writes."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_proxy import Proxy, locking_proxy
from s3_server import S3Server, s3_server
from surroundings import clean_surroundings  # noqa: F401 (a fixture)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[S3Server, Proxy]]:
    """rclone, and a proxy before it that keeps ``If-None-Match``."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server, locking_proxy(server) as proxy:
        yield server, proxy


@pytest.fixture
def bucket(s3: tuple[S3Server, Proxy], monkeypatch: pytest.MonkeyPatch) -> str:
    """A new bucket, which also processes that are started find through the proxy."""
    server, proxy = s3
    for name, value in {**server.aws_environment(), "AWS_ENDPOINT_URL": proxy.url}.items():
        monkeypatch.setenv(name, value)
    folder = server.folder / f"bucket-{secrets.token_hex(4)}"
    folder.mkdir()
    return f"s3://{folder.name}"


@pytest.fixture(params=["folder", pytest.param("S3", marks=pytest.mark.exhaustive)])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a registry, each kind once."""
    return str(tmp_path / "registry") if request.param == "folder" else f"{request.getfixturevalue('bucket')}/models"
