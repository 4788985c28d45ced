"""The process that feeds wandb, with a real wandb: what arrives, and what its end or a bad server costs."""

import hashlib
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wandb_runs
from click.testing import CliRunner
from fake_wandb_server import FakeServer, fake_server
from PIL import Image
from processes import processes_with, wait_until
from wandb_runs import END, HYPERPARAMETERS, IMAGES, ROWS, logged_rows, read_wandb_log, start, write_run

from flyte_ddp.core.settings import Settings
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.tracking import wandb_run
from flyte_ddp.tracking.__main__ import tracking
from flyte_ddp.tracking.wandb_run import WandbProcess, log_to_wandb

KEY = "0123456789abcdef" * 2 + "01234567"
FEED = "flyte_ddp.tracking.wandb_feed"
pytestmark = pytest.mark.slow


@dataclass
class Case:
    """A run folder, and a mark in the environment of every process that the test starts, directly or not."""

    folder: Path
    mark: str
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    @contextmanager
    def server(self, behaviour: str = "works") -> Iterator[FakeServer]:
        """Run a server that wandb finds, with a key.

        The key ends with a newline, as ``kubectl create secret --from-file`` takes it over from an editor.
        """
        with fake_server(behaviour) as server:
            self.monkeypatch.setenv("WANDB_API_KEY", f"{KEY}\n")
            self.monkeypatch.setenv("WANDB_BASE_URL", server.url)
            yield server

    def start(self, *, timeout: float = 60.0, opened: bool = True, on_first_record: bool = False) -> WandbProcess:
        """Start the process, and wait until it has opened its run unless ``opened`` is false."""
        self.wandb = start(self.folder, timeout, on_first_record=on_first_record)
        if opened:
            wait_until(self.wandb.update_status)
        return self.wandb

    def processes(self, name: str = "") -> dict[int, str]:
        """Return id and command of each process that the test has started, with ``name`` in its command."""
        return processes_with(self.mark, name)

    def finish(self, *, write: bool = True, killed: bool = False, seconds: float = 60.0) -> str:
        """Write the run, end the process, and return what was printed to stderr; no process is left."""
        if write:
            write_run(self.folder)
        self.wandb.finish_sending(seconds)
        if killed:  # wandb's monitor, orphaned by a kill, looks for wandb every few seconds, and ends
            wait_until(lambda: self.processes() == self.processes("wandb-symon"))
        else:
            wait_until(lambda: not self.processes())  # wandb's monitor may end a moment after wandb
        output = self.capsys.readouterr()
        assert output.out == ""
        return output.err

    def break_wandb(self) -> None:
        """Make whoever imports wandb fail."""
        (self.folder.parent / "wandb.py").write_text("raise ModuleNotFoundError(\"No module named 'wandb'\")")
        self.monkeypatch.setenv("PYTHONPATH", str(self.folder.parent))


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Case]:
    """A run in a folder of its own; none of its processes outlives the test."""
    found = Case(tmp_path / "run", uuid.uuid4().hex, monkeypatch, capsys)
    found.folder.mkdir()
    monkeypatch.setenv("FLYTE_DDP_TEST_MARK", found.mark)
    yield found
    for pid in found.processes():
        os.kill(pid, signal.SIGKILL)


def test_a_run_gets_everything_at_the_times_of_the_records(case: Case) -> None:
    with case.server() as server:
        case.start()
        said = case.finish()
    assert said == f"wandb: {server.url}/someone/a-project/runs/exec-task-7\n"
    records = read_wandb_log(case.folder)
    history = [each["item"] for each in records["history"]]
    assert logged_rows(history) == ROWS
    times = [each["time"] for each in read_records(case.folder / "metrics.jsonl") if "step" in each]
    assert [row["_timestamp"] for row in history][: len(times)] == times
    (run,) = records["run"]
    assert (run["run_id"], run["project"], run["display_name"]) == ("exec-task-7", "a-project", "run")
    config: dict[str, Any] = {}
    for update in [run, *records["config"]]:
        config |= update.get("config", update).get("update", {})
    config.pop("_wandb")
    assert config == {**HYPERPARAMETERS, "run": {"num_ranks": 2, "device": "cpu", "classes": wandb_runs.CLASSES}}
    summary: dict[str, Any] = {}
    for update in records["summary"]:
        summary |= update.get("update", {})
    assert all(summary[key] == END[key] for key in ("test_accuracy", "seconds", "stopped"))
    assert [record["exit_code"] for record in records["exit"]] == [0]
    check_table([*server.uploads.values()])


@pytest.mark.parametrize("folder", ["run", "run/unfinished"])
def test_an_offline_run_is_sent_by_the_command_that_it_prints(case: Case, folder: str, tmp_path: Path) -> None:
    where = tmp_path / folder
    where.mkdir(exist_ok=True)
    with log_to_wandb(case.folder, Settings(wandb_mode="offline"), HYPERPARAMETERS):
        write_run(where)
    assert {path.name for path in where.iterdir()} == {"metrics.jsonl", "predictions.npz"}
    said = case.capsys.readouterr().err
    assert said.startswith("wandb: kept offline; send it with: python -m flyte_ddp.tracking send ")
    command = shlex.split(said.partition("with: python ")[2])
    case.monkeypatch.setenv("WANDB_MODE", "offline")  # as where the run was
    with case.server() as server:
        sent = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert logged_rows(server.history) == ROWS
    [name] = server.run_ids
    assert sent.stderr == f"wandb: {server.url}/someone/flyte-ddp/runs/{name}\n"
    check_table([*server.uploads.values()])


def test_files_that_a_pod_has_not_sent_are_kept(case: Case, tmp_path: Path) -> None:
    settings = Settings(wandb_mode="offline", wandb_kept_at=str(tmp_path / "kept"))
    with log_to_wandb(case.folder, settings, HYPERPARAMETERS):
        write_run(case.folder)
    assert case.capsys.readouterr().err.endswith(f" send run (stored in {tmp_path / 'kept/run'})\n")
    for name in ("metrics.jsonl", "predictions.npz"):
        assert (tmp_path / "kept/run" / name).read_bytes() == (case.folder / name).read_bytes()
    refused = CliRunner().invoke(tracking, ["send", str(tmp_path / "kept")])
    assert (refused.exit_code, "has no metrics.jsonl" in refused.output) == (1, True)


def check_table(contents: list[bytes]) -> None:
    """The table's rows, and the pictures in it pixel by pixel."""
    pictures = {hashlib.sha256(content).hexdigest(): content for content in contents if content.startswith(b"\x89PNG")}
    assert len(pictures) == wandb_runs.TABLE_ROWS
    table = next(json.loads(content) for content in contents if b'"column_types"' in content)
    assert table["columns"] == ["id", "image", "prediction", "truth", "score_boot", "score_bag", "score_shirt"]
    named = [(row[0], row[2], row[3]) for row in table["data"]]
    assert named == [(0, "boot", "boot"), (1, "bag", "bag"), (2, "shirt", "bag"), (3, "boot", "boot")]
    for row, image, scores in zip(table["data"], IMAGES, wandb_runs.SCORES, strict=False):
        picture = Image.open(io.BytesIO(pictures[row[1]["sha256"]]))
        np.testing.assert_array_equal(np.asarray(picture), image[..., 0])
        np.testing.assert_array_equal(np.array(row[4:], np.float32), scores)


@pytest.mark.parametrize("behaviour", ["hangs", pytest.param("babbles", marks=pytest.mark.exhaustive)])
def test_a_bad_server_costs_bounded_time_and_a_message(case: Case, behaviour: str) -> None:
    assert wandb_run.OPEN_SHARE == 0.25
    case.monkeypatch.setattr(wandb_run, "OPEN_SHARE", 0.05)
    with case.server(behaviour) as server:
        begin = time.monotonic()
        case.start(opened=False)
        assert time.monotonic() - begin < 0.5
        write_run(case.folder)
        wait_until(lambda: server.requests)
        written = (case.folder / "metrics.jsonl").read_bytes()
        begin = time.monotonic()
        said = case.finish(write=False, killed=True, seconds=20.0)
        assert time.monotonic() - begin < 2.5
    assert (case.folder / "metrics.jsonl").read_bytes() == written
    assert said.startswith("wandb: nothing was logged (")
    assert said.count("\n") == 1


IMPATIENT = "import sys; from flyte_ddp.tracking import wandb_feed as feed; feed.RETRY_SECONDS = 0.1; "
IMPATIENT += "feed.send_records_to_wandb(feed.Connection(int(sys.argv[1])))"


def test_a_server_that_comes_back_gets_everything_and_no_file_the_key(case: Case) -> None:
    home = case.folder.with_name("home")
    case.monkeypatch.setenv("HOME", str(home))
    case.monkeypatch.setattr(wandb_run, "COMMAND", (sys.executable, "-c", IMPATIENT))
    with case.server("denies") as server:
        wandb = case.start(opened=False)
        wait_until(lambda: not wandb.update_status() and wandb.status.reason)
        server.behaviour = "works"
        wait_until(wandb.update_status)
        said = case.finish()
    assert said == f"wandb: {server.url}/someone/a-project/runs/exec-task-7\n"
    assert server.run_ids == {"exec-task-7"}
    assert logged_rows(server.history) == ROWS
    (table,) = (json.loads(body) for name, body in server.uploads.items() if name.startswith("media/table/predictions"))
    assert [row[0] for row in table["data"]] == [0, 1, 2, 3]
    files = [path for folder in (home, case.folder) for path in folder.rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def test_a_wandb_that_is_killed_is_not_waited_for(case: Case) -> None:
    with case.server() as server:
        wandb = case.start(timeout=2)
        for victim in case.processes(FEED):
            os.kill(victim, signal.SIGKILL)
        begin = time.monotonic()
        wandb.finish_sending(2.0)
        assert time.monotonic() - begin < 3
        wait_until(lambda: case.processes() == case.processes("wandb-symon"), seconds=15)
    said = case.capsys.readouterr().err
    assert said.startswith(f"wandb: {server.url}/someone/a-project/runs/exec-task-7 is not complete (wandb was killed")
    assert said.endswith(f"); send it with: python -m flyte_ddp.tracking send {case.folder}\n")


def test_wandb_that_cannot_start_is_printed_and_not_raised(case: Case) -> None:
    """Because it is disabled, not installed, or cannot make its folder."""
    with log_to_wandb(case.folder, Settings(wandb_mode="disabled"), HYPERPARAMETERS):
        assert list(case.folder.iterdir()) == []
    case.break_wandb()
    case.start(opened=False)
    said = case.finish()
    assert said.startswith("wandb: nothing was logged (ModuleNotFoundError: No module named 'wandb'); send it with: ")
    assert "ModuleNotFoundError" in (case.folder / "wandb/feed.log").read_text()
    with log_to_wandb(Path("/dev/null"), Settings(wandb_mode="online"), HYPERPARAMETERS):
        assert case.capsys.readouterr().err.startswith("wandb: not started (")


# Own functions: a run begins with the first record


FUNCTION_START = {"kind": "start", "function": "mine:train", "hyperparameters": {"epochs": 2}, "num_ranks": 2}
FUNCTION_ROWS = [{"step": 1, "test_accuracy": 0.5}, {"step": 1, "epochs": 7}, {"step": 2, "train/loss": 0.25}]
FUNCTION_RECORDS = [{"kind": "record", **row} for row in FUNCTION_ROWS]
FUNCTION_END = {"kind": "end", "step": 2, "seconds": 1.5}


def test_the_first_record_of_a_function_opens_its_run(case: Case) -> None:
    """With the names of the function's values; what else is in its folder is its own."""
    (case.folder / "predictions.npz").write_bytes(b"no predictions of images")
    with case.server() as server:
        wandb = case.start(opened=False, on_first_record=True)
        wandb_runs.write_records(case.folder, [FUNCTION_START])
        assert not wandb.update_status()
        assert not server.requests
        wandb_runs.write_records(case.folder, FUNCTION_RECORDS)
        wait_until(wandb.update_status)
        wandb_runs.write_records(case.folder, [FUNCTION_END])
        said = case.finish(write=False)
    assert said == f"wandb: {server.url}/someone/a-project/runs/exec-task-7\n"
    assert logged_rows(server.history) == FUNCTION_ROWS
    assert [name for name in server.uploads if "table" in name] == []


def test_a_function_that_records_nothing_leaves_nothing_and_imports_no_wandb(case: Case) -> None:
    """Nor does what an earlier attempt has recorded open a run."""
    case.break_wandb()
    wandb_runs.write_records(case.folder, [FUNCTION_START, *FUNCTION_RECORDS])
    case.start(opened=False, on_first_record=True)
    wandb_runs.write_records(case.folder, [FUNCTION_START, FUNCTION_END])
    assert case.finish(write=False) == ""
    with log_to_wandb(case.folder, Settings(wandb_mode="offline"), HYPERPARAMETERS, on_first_record=True):
        (case.folder / "metrics.jsonl").write_bytes(b"")
    assert case.capsys.readouterr().err == ""
    assert [path.name for path in case.folder.iterdir()] == ["metrics.jsonl"]
