"""A short temper in place of long retries."""

import pytest
from surroundings import clean


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    clean(monkeypatch)
