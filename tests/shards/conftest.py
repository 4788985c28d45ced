"""Servers for these tests, and a short temper in place of long retries."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "storage")]  # for what other tests use too

from file_server import FileServer, file_server  # noqa: E402
from surroundings import clean  # noqa: E402


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    clean(monkeypatch)


@pytest.fixture
def server() -> Iterator[FileServer]:
    """A server with nothing on it yet."""
    with file_server() as running:
        yield running
