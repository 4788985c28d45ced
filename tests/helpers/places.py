"""A folder on each kind of storage, on loopback."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from file_server import FileServer, file_server
from surroundings import azure_environment, s3_environment

OBJECTS = ["s3", "gs", "az"]
KINDS = ["path", "file", "http", *OBJECTS]


@dataclass(frozen=True)
class Place:
    """The folder at ``address``; what is on the server is under the names that begin with ``prefix``."""

    address: str
    folder: Path
    server: FileServer
    prefix: str

    def put(self, name: str, content: bytes) -> str:
        """Write a file; return its address."""
        if self.prefix:
            self.server.files[f"{self.prefix}{name}"] = content
        else:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(content)
        return f"{self.address}/{name}"


@contextmanager
def place_of(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Yield an empty folder on a kind of storage, and set the variables by which clients find it."""
    with file_server() as server:
        s3_environment(server.url, monkeypatch)
        azure_environment(server.url, monkeypatch)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        addresses = {
            "path": str(folder),
            "file": f"file://{folder}",
            "http": f"{server.url}/bucket/folder",
            **{scheme: f"{scheme}://bucket/folder" for scheme in OBJECTS},
        }
        prefix = "" if kind in ("path", "file") else "bucket/folder/"
        yield Place(addresses[kind], folder, server, prefix)
