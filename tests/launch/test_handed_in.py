"""The way of users' results from a rank to its launcher: whole, in order, and in nobody's way."""

from __future__ import annotations

import json
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faults
import pytest
from engines import AGENTS, SPAWN, Launch, on
from faulty_runs import HP

from flyte_ddp import results
from flyte_ddp.launch.supervise import handed_in, supervisor
from flyte_ddp.launch.supervise.link import Link
from flyte_ddp.launch.supervise.processes import ProcessHandle
from flyte_ddp.launch.supervise.rank_handle import RankHandle
from flyte_ddp.launch.supervise.stopping import StopRequest
from flyte_ddp.launch.supervise.supervisor import listen
from flyte_ddp.run import run_training
from flyte_ddp.settings import Settings

CONTENT = random.Random(1).randbytes(3 * handed_in.PIECE_BYTES + 5)
LARGE = b"1" * ((handed_in.MOST_UNCONFIRMED + 3) * handed_in.PIECE_BYTES)


class Both:
    """A rank's link, whose rank is a thread of the test, and the launcher's handle."""

    def __init__(self, folder: Path) -> None:
        pipe, its_pipe = Pipe()
        self.link = Link(its_pipe)
        process: Any = SimpleNamespace(pid=0, exitcode=None, sentinel=None)
        self.handle = ProcessHandle(0, process, pipe, pipe)
        self.handle.hand_over(pickle.loads(pickle.dumps(SimpleNamespace(run_folder=folder, checkpoint=None))))

    def listen_until(self, over: threading.Event) -> None:
        while not over.is_set():
            listen([self.handle], StopRequest(), 0.01)


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Both]:
    made = Both(tmp_path)
    yield made
    close(made)
    KEPT.append(made)


KEPT: list[Both] = []  # a link ends its process with its launcher's end of the pipe, and this one is to go on


def close(both: Both) -> None:
    assert both.handle.inbox is not None
    handed_in.close([both.handle.inbox])


def slow(monkeypatch: pytest.MonkeyPatch, wait: Callable[[], object]) -> None:
    """Has the launcher wait before each piece that it writes."""
    pieces = handed_in.Inbox._pieces

    def slowly(inbox: handed_in.Inbox, message: dict[str, Any]) -> Iterator[bytes]:
        for piece in pieces(inbox, message):
            wait()
            yield piece

    monkeypatch.setattr(handed_in.Inbox, "_pieces", slowly)


def rank_does(both: Both, action: Any) -> None:
    """Has the rank's thread do this, while the launcher listens, and waits for its end."""
    over = threading.Event()

    def act() -> None:
        with results.delivered_by(both.link.hand_in, rank=0):
            action()
        over.set()

    threading.Thread(target=act, daemon=True).start()
    both.listen_until(over)
    listen([both.handle], StopRequest(), 0.0)
    close(both)


def test_files_of_any_size_arrive_in_order(both: Both, tmp_path: Path) -> None:
    def hand_in() -> None:
        results.submit("large.bin", CONTENT)
        results.submit("empty.bin", b"")
        results.event(step=1)
        results.submit("a/large.bin", CONTENT[::-1])
        results.submit("large.bin", CONTENT[1:])
        results.event(step=2)

    rank_does(both, hand_in)
    folder = tmp_path / "results"
    assert (folder / "large.bin").read_bytes() == CONTENT[1:]
    assert (folder / "a/large.bin").read_bytes() == CONTENT[::-1]
    assert (folder / "empty.bin").read_bytes() == b""
    assert [json.loads(line)["step"] for line in (folder / "events.jsonl").read_text().splitlines()] == [1, 2]
    assert len([*folder.rglob("*.bin")]) == 3
    assert not [*folder.rglob(".*")]


def test_a_file_that_cannot_be_written_keeps_no_other_back(
    both: Both, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results/in the way").mkdir(parents=True)

    def hand_in() -> None:
        results.submit("in the way", LARGE)
        results.submit("other", LARGE)

    rank_does(both, hand_in)
    assert "cannot write" in capsys.readouterr().err
    assert (tmp_path / "results/other").read_bytes() == LARGE


def test_of_a_rank_that_ends_in_the_middle_of_a_file_nothing_is_left(both: Both, tmp_path: Path) -> None:
    inbox = both.handle.inbox
    assert inbox is not None
    first, *_ = handed_in.messages("result", name="large.bin", content=CONTENT)
    inbox.put(first)
    close(both)
    assert inbox.thread is not None
    assert not inbox.thread.is_alive()
    assert [*(tmp_path / "results").iterdir()] == []


def test_of_a_failed_run_all_that_was_handed_in_has_one_limit_and_what_is_given_up_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also what would be complete with the piece that is being written, and what waits behind it."""
    monkeypatch.setattr(handed_in, "CLOSE_SECONDS", 0.3)
    writable = threading.Event()
    slow(monkeypatch, lambda: writable.wait(20))
    folder = tmp_path / "results"
    inboxes = [handed_in.Inbox(tmp_path, lambda: None) for _ in range(4)]
    for rank, inbox in enumerate(inboxes):
        for message in handed_in.messages("result", name=f"{rank}.bin", content=b"1"):
            inbox.put(message)
        inbox.put({"kind": "event", "record": {}})
    begin = time.monotonic()
    handed_in.close(inboxes)
    assert 0.3 <= time.monotonic() - begin < 0.9
    assert capsys.readouterr().err == f"not all that was handed in is in {folder}\n" * 4
    writable.set()
    for inbox in inboxes:
        assert inbox.thread is not None
        inbox.thread.join(20)
    assert [*folder.iterdir()] == []
    assert capsys.readouterr().err == ""


def test_a_disk_that_takes_nothing_holds_up_neither_the_launcher_nor_other_messages(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    writable = threading.Event()
    monkeypatch.setattr(results.ResultWriter, "write_file", lambda *_, content, **__: writable.wait(30) and [*content])

    def hand_in() -> None:
        results.submit("large.bin", LARGE)

    def hand_in_and_save() -> None:
        waiting = threading.Thread(target=hand_in, daemon=True)
        waiting.start()
        both.handle.send("save")
        while both.handle.saved is None:
            assert waiting.is_alive(), "so much is not taken at once"
            assert time.monotonic() < begin + 20
        writable.set()
        waiting.join()

    begin = time.monotonic()
    rank_does(both, hand_in_and_save)
    assert both.handle.saved == 0


@pytest.mark.slow
@on(AGENTS, exhaustive=(SPAWN,))
def test_a_run_that_completes_has_all_that_was_handed_in_however_slow_the_disk_is(
    launch: Launch, digits: Path, tmp_path: Path, quiet: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the rank that has handed it in is the last one that is still there."""
    completed = threading.Event()
    handle_message = supervisor.handle_message

    def noticing(message: dict[str, Any], handle: RankHandle, *others: Any) -> None:
        handle_message(message, handle, *others)
        if handle.rank == 0 and handle.completed:
            completed.set()

    monkeypatch.setattr(supervisor, "handle_message", noticing)
    monkeypatch.setattr(handed_in, "CLOSE_SECONDS", 0.1)
    slow(monkeypatch, lambda: completed.wait(60) and time.sleep(1.0))
    faults.inject(monkeypatch, tmp_path / "marker", rank=1, at="training", kind="small result")
    found = run_training(HP, digits, tmp_path / "run", quiet, launch=launch).run_folder / "results"
    assert {path.name: path.read_bytes() for path in found.iterdir()} == {"small": b"1"}
