"""What users' code hands in reaches the launcher's run folder from any rank: whole, in order, and in nobody's way."""

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
from trials import Trial

from flyte_ddp import results
from flyte_ddp.errors import StoppedError
from flyte_ddp.launch.remote import file_sync, proxy
from flyte_ddp.launch.remote.file_sync import FileSender, write_piece
from flyte_ddp.launch.supervise.processes import RankHandle

CONTENT = random.Random(1).randbytes(3 * 1000 + 5)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_sync, "PIECE_BYTES", 1000)


def test_files_of_any_size_arrive_from_several_hosts(tmp_path: Path) -> None:
    """And events whole, though many ranks write them."""
    launcher, hosts = tmp_path / "launcher", [tmp_path / name for name in ("a", "b")]
    for folder in (launcher, *hosts):
        folder.mkdir()

    def hand_in(host: Path, number: int) -> None:
        sender = FileSender(host, lambda piece: write_piece(launcher, piece))
        writer = results.ResultWriter(host)
        with sender.send_results_during():
            for step in range(20):
                writer.write("event", record={"rank": number, "step": step, "text": "x" * 5000})
                sender.send_results()
            writer.write("result", name=f"{number}/large.bin", content=CONTENT)
            writer.write("result", name=f"{number}/empty.bin", content=b"")
            sender.send_results()
            writer.write("result", name=f"{number}/large.bin", content=CONTENT[1:])
        sender.send_results()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(hand_in, hosts, range(2)))
    folder = launcher / "results"
    for number in range(2):
        assert (folder / f"{number}/large.bin").read_bytes() == CONTENT[1:]
        assert (folder / f"{number}/empty.bin").read_bytes() == b""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    for number in range(2):
        assert [event["step"] for event in events if event["rank"] == number] == [*range(20)]
    assert not [*folder.rglob(".*")]


def test_a_checkpoint_does_not_wait_for_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the launcher's disk takes results slowly, and the run is told to stop meanwhile."""
    monkeypatch.setattr(file_sync, "SEND_SECONDS", 0.01)
    monkeypatch.setattr(proxy, "SEND_SECONDS", 0.01)
    (pipe, launcher), (from_rank, rank) = Pipe(), Pipe()
    handle = RankHandle(0, from_rank, "127.0.0.1")
    is_sending, may_send = threading.Event(), threading.Event()

    def send(message: dict[str, Any]) -> None:
        if message.get("name") == "results/large":
            is_sending.set()
            may_send.wait()
        pipe.send(message)

    sender = FileSender(tmp_path, send)
    results.ResultWriter(tmp_path).write("result", name="large", content=CONTENT)
    relaying = threading.Thread(target=proxy.relay_messages, args=(handle, pipe, send, sender))
    with sender.send_results_during():
        relaying.start()
        is_sending.wait()
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints/a.ckpt").write_bytes(b"checkpoint")
        rank.send({"kind": "saved", "step": 3})
        received = [launcher.recv(), launcher.recv()]
        handle.exitcode = 0
        may_send.set()
    relaying.join()
    assert [message.get("name", message["kind"]) for message in received] == ["checkpoints/a.ckpt", "saved"]
    while (message := launcher.recv())["kind"] != "exit":
        write_piece(tmp_path / "launcher", message)
    assert (tmp_path / "launcher/results/large").read_bytes() == CONTENT


@pytest.mark.slow
def test_a_stop_while_a_rank_writes_to_a_slow_folder_saves_the_last_step(trial: Trial) -> None:
    """Of the rank itself that saves, for which the other waits in a collective."""
    trial.inject("slow result", rank=0)
    told = trial.signal_when_failing()
    with pytest.raises(StoppedError, match="the same run will go on after step 3, which is saved"):
        trial.train()
    told.join()
    assert trial.seconds_since_fault() < 15
