"""What these tests share."""

from __future__ import annotations

import pytest
from cli import HELPERS


@pytest.fixture
def models_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HELPERS)
