"""What users' code hands in on another host reaches the launcher's run folder: whole, in order, and in nobody's way."""

from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
from test_rendezvous import worker
from trials import Trial

from flyte_ddp.core import results
from flyte_ddp.core.errors import StoppedError
from flyte_ddp.core.files import FilePiece
from flyte_ddp.core.launch.remote import file_sync, proxy
from flyte_ddp.core.launch.remote.file_sync import FileSender, write_piece
from flyte_ddp.core.launch.remote.remote_handle import RemoteHandle
from flyte_ddp.core.launch.supervise.link import PipeEnd
from flyte_ddp.core.launch.supervise.messages import Exited, Notice, Saved
from flyte_ddp.core.launch.supervise.rank_handle import RankHandle
from flyte_ddp.core.results import Event, ResultPiece
from flyte_ddp.core.text.json_lines import read_records


def test_results_and_events_of_ranks_elsewhere(tmp_path, monkeypatch, capfd) -> None:
    """One that cannot be written is told once, and the run continues."""
    monkeypatch.setattr(results, "PIECE_BYTES", 400)
    launcher, (pipe, theirs) = tmp_path / "launcher", Pipe()
    handle, rank = RemoteHandle(worker(0, pipe), "host", launcher, tmp_path), PipeEnd(theirs)
    deliver = results.send_results_in_pieces(rank.send)
    (launcher / f"results/.full.{id(handle.results)}.tmp").mkdir(parents=True)  # in the way of its first piece
    for number in (1, 2):
        deliver(ResultPiece("maps/large.bin", bytes([number]) * 1000))
        deliver(Event({"step": number}))
    for name in ("empty", "full", "../elsewhere"):
        deliver(ResultPiece(name, bytes(500) if name == "full" else b""))
    rank.send(Notice.COMPLETED)
    for message in handle.read_messages():
        handle.handle_message(message)
    assert handle.completed
    assert (launcher / "results/maps/large.bin").read_bytes() == b"\2" * 1000
    assert (launcher / "results/empty").read_bytes() == b""
    assert not (launcher / "results/full").exists()
    assert [event["step"] for event in read_records(launcher / "results/events.jsonl")] == [1, 2]
    assert capfd.readouterr().err.count("; the run continues without it") == 1


def test_what_rank_0_writes_comes_before_the_message_about_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints and new lines of metrics at once, its other files in the end, in pieces."""
    monkeypatch.setattr(file_sync, "PIECE_BYTES", 1000)
    host, copy = tmp_path / "host", tmp_path / "launcher"
    (host / "checkpoints").mkdir(parents=True)
    (host / "metrics.jsonl").write_text("sent before\n")
    copy.mkdir()
    (copy / "metrics.jsonl").write_text("sent before\n")
    (pipe, launcher), (from_rank, rank) = Pipe(), Pipe()
    handle = RankHandle(0, from_rank, "127.0.0.1")
    content = {"metrics.jsonl": b"sent before\nnew\n", "checkpoints/a.ckpt": bytes(3005), "own/empty": b""}
    (host / "own").mkdir()

    class Sender(FileSender):
        """Sends what is written after it was made."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            for name, data in content.items():
                (host / name).write_bytes(data)

    monkeypatch.setattr(proxy, "FileSender", Sender)
    rank.send(Saved(3))
    rank.send(Notice.COMPLETED)
    handle.exitcode = 0
    assert not proxy.relay_until_exit(handle, pipe, pipe.send, host)
    kinds: list[type] = []
    while Exited not in kinds:
        message = launcher.recv()
        kinds.append(type(message))
        if isinstance(message, FilePiece):
            write_piece(copy, message)
    assert kinds == [*[FilePiece] * 5, Saved, FilePiece, Notice, Exited]
    assert {name: (copy / name).read_bytes() for name in content} == content


def test_files_that_are_being_written_are_not_sent(tmp_path: Path) -> None:
    sent: list[Any] = []
    sender = FileSender(tmp_path, sent.append)
    for name in ("checkpoints/.a.ckpt.1.tmp", ".returned.pickle.1.tmp", "own/.settings", "own/model"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    sender.send_changes(all_files=True)
    assert sorted(piece.name for piece in sent) == ["own/.settings", "own/model"]


def test_a_checkpoint_does_not_wait_for_results() -> None:
    """Of the rank that saves in another thread: what it says of its checkpoint comes between a result's pieces."""
    launcher, theirs = Pipe()
    rank = PipeEnd(theirs)
    with ThreadPoolExecutor(2) as pool:
        deliver, content = results.send_results_in_pieces(rank.send), bytes(16 * results.PIECE_BYTES)
        pool.submit(deliver, ResultPiece("large", content))
        launcher.recv()  # the next piece is on its way
        pool.submit(rank.send, Saved(3))
        kinds = [type(launcher.recv()) for _ in range(16)]
    assert Saved in kinds[:-1]


@pytest.mark.slow
def test_a_stop_while_a_rank_writes_to_a_slow_folder_saves_the_last_step(trial: Trial) -> None:
    """Of the rank itself that saves, for which the other waits in a collective."""
    trial.inject("slow result", rank=0)
    told = trial.signal_when_failing()
    with pytest.raises(StoppedError, match="the same run will go on after step 3, which is saved"):
        trial.train()
    told.join()
    assert trial.seconds_since_fault() < 15
