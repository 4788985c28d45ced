"""What tells the processes of a test from others."""

import os
import signal
import uuid
from collections.abc import Iterator

import pytest
from processes import processes_with


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Text in the environment of every process that this test starts, directly or not; none may outlive it."""
    value = uuid.uuid4().hex
    monkeypatch.setenv("FLYTE_DDP_TEST_MARK", value)
    yield value
    for pid in processes_with(value):
        os.kill(pid, signal.SIGKILL)
