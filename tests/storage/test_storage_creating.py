"""Files that are written once: in a folder, and on an S3 server that knows conditional writes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from locking_proxy import locking_proxy
from s3_server import s3_server

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.storage import ExistsError, UnavailableError


@pytest.fixture(params=["folder", "S3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "made")
        return
    (tmp_path / "bucket").mkdir()
    with s3_server(tmp_path) as server, locking_proxy(server) as proxy:
        for name, value in {**server.aws_environment(), "AWS_ENDPOINT_URL": proxy.url}.items():
            monkeypatch.setenv(name, value)
        yield "s3://bucket/made"


def test_a_file_is_written_once(folder: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"from a file")
    for name, content in (("one", b"content"), ("deep/er", file)):
        address = storage.join(folder, name)
        storage.create_file(address, content)
        with pytest.raises(ExistsError):
            storage.create_file(address, b"other")
        assert storage.read_file(address) == (b"content" if name == "one" else b"from a file")
    assert [entry.name for entry in storage.list_files(folder)] == ["deep/er", "one"]


def test_nothing_but_the_file_is_left(tmp_path: Path) -> None:
    storage.create_file(str(tmp_path / "file"), b"content")
    with pytest.raises(ExistsError):
        storage.create_file(str(tmp_path / "file"), b"other")
    with pytest.raises(UnavailableError, match="No such file"):
        storage.create_file(str(tmp_path / "other"), tmp_path / "missing")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="File exists"):
        storage.create_file(str(tmp_path / "file/below"), b"")
    with pytest.raises(UserError, match="nothing can be written to a web server"):
        storage.create_file("https://example.org/x", b"")
