"""What these tests share."""

import pytest
from cli import HELPERS


@pytest.fixture
def models_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HELPERS)
