"""A short temper in place of long retries."""

from __future__ import annotations

import pytest
from surroundings import clean


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    clean(monkeypatch)
