"""Servers for these tests, and a short temper in place of long retries."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_server import FileServer, file_server
from surroundings import clean

sys.path.insert(0, str(Path(__file__).parents[1]))  # for s3_server, which other tests use too


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    clean(monkeypatch)


@pytest.fixture
def server() -> Iterator[FileServer]:
    """A server with nothing on it yet."""
    with file_server() as running:
        yield running
