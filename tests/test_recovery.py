"""What outlives a pod: checkpoints are brought and handed on, whatever comes in between."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from flytekit.exceptions.user import FlyteDataNotFoundException

from flyte_ddp.checkpoint import FOLDER, SLOTS
from flyte_ddp.errors import UnreachableError, UserError
from flyte_ddp.run_folder import UNFINISHED
from tasks import places, recovery


class Store:
    """Flyte's place for checkpoints: what the attempt before left, and what this one has sent."""

    def __init__(self, before: dict[str, bytes], trouble: Callable[[], object] = lambda: None) -> None:
        self.before, self.trouble = before, trouble
        self.sent: dict[str, bytes] = {}

    def prev_exists(self) -> bool:
        return True

    def restore(self, folder: Path) -> None:
        self.trouble()
        for name, content in self.before.items():
            (folder / name).write_bytes(content)

    def save(self, path: Path) -> None:
        self.sent[path.name] = path.read_bytes()


@pytest.fixture(autouse=True)
def _in_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "is_local", lambda: False)
    monkeypatch.setattr(recovery, "PAUSES", (0.0, 0.0))


def attempt(store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The checkpoints that training finds."""
    context = type("Context", (), {"checkpoint": store})
    monkeypatch.setattr(recovery, "current_context", context)
    with recovery.retried(), recovery.checkpoints_kept(folder):
        return sorted(path.name for path in (folder / UNFINISHED / FOLDER).glob("*.ckpt"))


def test_checkpoints_are_handed_on_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(dict.fromkeys(SLOTS, b"saved"))
    assert attempt(store, tmp_path, monkeypatch) == [*SLOTS]
    assert store.sent == store.before


def test_sigterm_while_they_are_fetched_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(dict.fromkeys(SLOTS, b"saved"), trouble=lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(recovery.FlyteRecoverableException, match="will go on from its last checkpoint"):
        attempt(store, tmp_path, monkeypatch)
    assert store.sent == store.before


def test_what_flyte_tries_again() -> None:
    with pytest.raises(recovery.FlyteRecoverableException, match="no answer"), recovery.retried():
        raise UnreachableError("no answer")
    with pytest.raises(UserError, match="wrong"), recovery.retried():
        raise UserError("wrong")


@pytest.mark.parametrize(("failures", "found"), [(1, [*SLOTS]), (2, [*SLOTS]), (3, [])])
def test_a_store_that_fails_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failures: int, found: list[str]
) -> None:
    errors = iter([OSError("503: slow down")] * failures)

    def fail() -> None:
        if error := next(errors, None):
            raise error

    assert attempt(Store(dict.fromkeys(SLOTS, b"saved"), trouble=fail), tmp_path, monkeypatch) == found
    said = capsys.readouterr().out
    assert said.count("503: slow down") == failures
    assert ("training begins anew" in said) == (not found)


def test_there_may_be_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def none_there() -> None:
        raise FlyteDataNotFoundException("checkpoint")

    assert attempt(Store({}, trouble=none_there), tmp_path, monkeypatch) == []
    assert "the attempt before left no checkpoint" in capsys.readouterr().out
