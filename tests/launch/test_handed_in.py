"""What users' code hands in reaches the launcher's run folder from any rank: whole, in order, and in nobody's way."""

import json
import random
import threading
from pathlib import Path
from typing import Any

import faults
import pytest
from engines import AGENTS, Launch, on
from faulty_runs import HP

from flyte_ddp import results
from flyte_ddp.errors import UserError
from flyte_ddp.launch.remote import file_sync, rendezvous
from flyte_ddp.launch.remote.file_sync import Mirror, take_piece
from flyte_ddp.run import run_training
from flyte_ddp.settings import Settings

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
        mirror = Mirror(host, lambda piece: take_piece(launcher, piece))
        writer = results.ResultWriter(host)
        with mirror.following():
            for step in range(20):
                writer.write("event", record={"rank": number, "step": step, "text": "x" * 5000})
                mirror.send_new()
            writer.write("result", name=f"{number}/large.bin", content=CONTENT)
            writer.write("result", name=f"{number}/empty.bin", content=b"")
            mirror.send_new()
            writer.write("result", name=f"{number}/large.bin", content=CONTENT[1:])

    ranks = [threading.Thread(target=hand_in, args=(host, number)) for number, host in enumerate(hosts)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    folder = launcher / "results"
    for number in range(2):
        assert (folder / f"{number}/large.bin").read_bytes() == CONTENT[1:]
        assert (folder / f"{number}/empty.bin").read_bytes() == b""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    for number in range(2):
        assert [event["step"] for event in events if event["rank"] == number] == [*range(20)]
    assert not [*folder.rglob(".*")]


@pytest.mark.slow
@pytest.mark.usefixtures("temporary")
@on(AGENTS)
def test_a_launcher_that_cannot_write_a_file_continues(
    launch: Launch, digits: Path, tmp_path: Path, quiet: Settings, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    def take_what_is_no_result(folder: Path, message: dict[str, Any]) -> None:
        if message["name"].startswith(results.FOLDER):
            raise UserError("cannot write it")
        take_piece(folder, message)

    monkeypatch.setattr(rendezvous, "take_piece", take_what_is_no_result)
    faults.inject(monkeypatch, tmp_path / "marker", rank=1, at="training", kind="small result")
    found = run_training(HP, digits, tmp_path / "run", quiet, launch=launch)
    assert "cannot write it; training continues without it" in capfd.readouterr().err
    assert found.model.exists()
