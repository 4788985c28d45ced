"""The process that feeds wandb, with a real wandb: what arrives, and what its end or a bad server costs."""

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wandb_runs
from fake_wandb_server import FakeServer, fake_server
from PIL import Image
from processes import processes_with, wait_until
from wandb_runs import END, HYPERPARAMETERS, IMAGES, RECORDS, ROWS, logged_rows, offline_records, start, write_run

from flyte_ddp.tracking import wandb_feed, wandb_run
from flyte_ddp.tracking.wandb_run import start_wandb

KEY = "0123456789abcdef" * 2 + "01234567"
FEED = "flyte_ddp.tracking.wandb_feed"
pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks at processes through /proc")


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Text in the environment of every process that this test starts, directly or not; none may outlive it."""
    value = uuid.uuid4().hex
    monkeypatch.setenv("FLYTE_DDP_TEST_MARK", value)
    yield value
    for pid in processes_with(value):
        os.kill(pid, signal.SIGKILL)


@contextmanager
def served(monkeypatch: pytest.MonkeyPatch, behaviour: str = "works") -> Iterator[FakeServer]:
    """A server that wandb finds, with a key.

    The key ends with a newline, as ``kubectl create secret --from-file`` takes it over from an editor.
    """
    with fake_server(behaviour) as server:
        monkeypatch.setenv("WANDB_API_KEY", f"{KEY}\n")
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        yield server


def check_kept_offline(folder: Path, said: str) -> None:
    """An offline run has all rows, there is no other one, and the user is told so on one line."""
    assert said.startswith("wandb: kept offline")
    assert said.count("\n") == 1
    assert logged_rows([each["item"] for each in offline_records(folder)["history"]]) == ROWS
    assert list((folder / "wandb").glob("run-*")) == []


@pytest.mark.slow
def test_an_offline_run_holds_everything(tmp_path: Path, mark: str, capsys: pytest.CaptureFixture[str]) -> None:
    wandb = start(tmp_path, "offline")
    wait_until(wandb.receive_status)
    write_run(tmp_path)
    wandb.finish()
    assert processes_with(mark) == {}
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("wandb: kept offline; send it with: wandb sync ")
    check_kept_offline(tmp_path, output.err)

    records = offline_records(tmp_path)
    (run,) = records["run"]
    assert (run["run_id"], run["project"], run["display_name"]) == ("exec-task-7", "a-project", "a name")
    config: dict[str, Any] = {}
    for update in [run, *records["config"]]:
        config |= update.get("config", update).get("update", {})
    config.pop("_wandb")
    assert config == {**HYPERPARAMETERS, "run": {"num_ranks": 2, "device": "cpu", "classes": wandb_runs.CLASSES}}
    summary: dict[str, Any] = {}
    for update in records["summary"]:
        summary |= update.get("update", {})
    assert all(summary[key] == END[key] for key in ("test_accuracy", "seconds", "stopped"))
    (histogram,) = (each["item"] for each in records["history"] if "parameters/conv.weight.bins" in each["item"])
    found = [histogram[key] for key in ("parameters/conv.weight.values", "parameters/conv.weight.bins", "step")]
    assert found == [wandb_runs.COUNTS, wandb_runs.EDGES, 40]
    assert [record["exit_code"] for record in records["exit"]] == [0]
    check_table(tmp_path)


def check_table(folder: Path) -> None:
    """The table's rows, and the pictures in it pixel by pixel."""
    contents = [path.read_bytes() for path in (folder / "wandb/artifacts").rglob("*") if path.is_file()]
    pictures = {hashlib.sha256(content).hexdigest(): content for content in contents if content.startswith(b"\x89PNG")}
    assert len(pictures) == wandb_runs.TABLE_ROWS
    table = next(json.loads(content) for content in contents if b'"column_types"' in content)
    assert table["columns"] == ["id", "image", "prediction", "truth", "score_0", "score_1", "score_2"]
    named = [(row[0], row[2], row[3]) for row in table["data"]]
    assert named == [(0, "boot", "boot"), (1, "bag", "bag"), (2, "shirt", "bag"), (3, "boot", "boot")]
    for row, image, scores in zip(table["data"], IMAGES, wandb_runs.SCORES, strict=False):
        picture = Image.open(io.BytesIO(pictures[row[1]["sha256"]]))
        np.testing.assert_array_equal(np.asarray(picture), image[..., 0])
        np.testing.assert_array_equal(np.array(row[4:], np.float32), scores)


@pytest.mark.parametrize("names", [[f"class/{number}.jpg" for number in range(6)], []])
@pytest.mark.parametrize("classes", [3, 1001])
def test_the_table_has_names_and_not_too_many_scores(tmp_path: Path, names: list[str], classes: int) -> None:
    """Of many classes only the score of the prediction: wandb would take a column for each class."""
    scores = np.zeros((6, classes), dtype=np.float32)
    scores[np.arange(6), [2, 1, 0, 1, 2, 0]] = 0.5
    arrays = {
        "index": np.arange(6),
        "images": IMAGES,
        "scores": scores,
        "truth": wandb_runs.TRUTH,
        "table_rows": np.array(3),
    }
    np.savez(tmp_path / "predictions.npz", **arrays, names=np.array(names, dtype=np.str_))
    table = wandb_feed.predictions_table(tmp_path / "predictions.npz", [f"class {k}" for k in range(classes)])
    assert [row[0] for row in table.data] == (names[:3] or [0, 1, 2])
    assert [row[2] for row in table.data] == ["class 2", "class 1", "class 0"]
    assert table.columns[4:] == (["score"] if classes > 1000 else ["score_0", "score_1", "score_2"])
    assert table.data[0][4:] == ([0.5] if classes > 1000 else [0, 0, 0.5])


REFUSED = "(ValidationError: 1 validation error for Settings"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "variable", "value", "words"),
    [
        pytest.param("online", "WANDB_API_KEY", "", "No API key configured", id="no key"),
        pytest.param("offline", "WANDB_TAGS", "a" * 65, REFUSED, id="long tag"),
        pytest.param("online", "WANDB_HTTP_TIMEOUT", "soon", REFUSED, marks=pytest.mark.exhaustive, id="no number"),
    ],
)
def test_without_a_key_or_with_a_bad_setting_nothing_is_lost(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    mode: str, variable: str, value: str, words: str,
) -> None:  # fmt: skip
    monkeypatch.setenv(variable, value)
    wandb = start(tmp_path, mode)
    write_run(tmp_path)
    wandb.finish()
    assert processes_with(mark) == {}
    said = capsys.readouterr().err
    assert words in said
    check_kept_offline(tmp_path, said)


@pytest.mark.slow
@pytest.mark.parametrize(
    "behaviour",
    [
        "hangs",
        "denies",
        *[pytest.param(each, marks=pytest.mark.exhaustive) for each in ("refuses", "fails", "babbles")],
    ],
)
def test_a_bad_server_costs_bounded_time_and_no_data(
    tmp_path: Path, mark: str, behaviour: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wandb_run.OPEN_SHARE == 0.25
    monkeypatch.setattr(wandb_run, "OPEN_SHARE", 0.05)
    with served(monkeypatch, behaviour) as server:
        begin = time.monotonic()
        wandb = start(tmp_path, "online", timeout=20)
        assert time.monotonic() - begin < 0.5
        write_run(tmp_path)
        wait_until(lambda: server.requests or behaviour == "refuses")
        written = (tmp_path / "metrics.jsonl").read_bytes()
        begin = time.monotonic()
        wandb.finish()
        assert time.monotonic() - begin < 20.5
    assert processes_with(mark) == {}
    assert (tmp_path / "metrics.jsonl").read_bytes() == written
    check_kept_offline(tmp_path, capsys.readouterr().err)


@pytest.mark.slow
def test_the_offline_run_of_a_later_attempt_has_all_records(
    tmp_path: Path, mark: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ``wandb sync`` replaces a run by another one of the same id (public reports: wandb issues 3841 and 5865)."""
    wandb_runs.write_records(tmp_path, RECORDS[:4])  # of an attempt that was cut off
    wandb = start(tmp_path, "offline")
    wait_until(wandb.receive_status)
    wandb_runs.write_records(tmp_path, [*RECORDS[4:], END])
    wandb.finish()
    check_kept_offline(tmp_path, capsys.readouterr().err)


def check_arrived(server: FakeServer, said: str) -> None:
    assert said == f"wandb: {server.url}/someone/a-project/runs/exec-task-7\n"
    assert server.run_ids == {"exec-task-7"}
    assert logged_rows(server.history) == ROWS
    (table,) = (json.loads(body) for name, body in server.uploads.items() if name.startswith("media/table/predictions"))
    assert [row[0] for row in table["data"]] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_good_server_gets_everything_and_no_file_the_key(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home, folder = tmp_path / "home", tmp_path / "run"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    with served(monkeypatch) as server:
        wandb = start(folder, "online")
        wait_until(wandb.receive_status)
        write_run(folder)
        wandb.finish()
    assert processes_with(mark) == {}
    check_arrived(server, capsys.readouterr().err)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.is_relative_to(home) for path in files)
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


IMPATIENT = "import sys; from flyte_ddp.tracking import wandb_feed as feed; feed.RETRY_SECONDS = 0.1; "
IMPATIENT += "feed.feed_wandb(feed.Connection(int(sys.argv[1])))"


@pytest.mark.slow
def test_a_server_that_comes_back_gets_everything(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wandb_run, "COMMAND", (sys.executable, "-c", IMPATIENT))
    with served(monkeypatch, "denies") as server:
        wandb = start(tmp_path, "online")
        wait_until(lambda: not wandb.receive_status() and wandb.status["reason"])
        server.behaviour = "works"
        wait_until(wandb.receive_status)
        write_run(tmp_path)
        wandb.finish()
    check_arrived(server, capsys.readouterr().err)
    assert [str(path) for path in (tmp_path / "wandb").glob("run-*")] == [wandb.status["folder"]]


PARENT = """
import sys, time
from pathlib import Path
from flyte_ddp.settings import Settings
from flyte_ddp.json_lines import JsonLines
from flyte_ddp.tracking.wandb_run import start_wandb
folder = Path(sys.argv[1])
wandb = start_wandb(folder, Settings(wandb_run_id="x"), {}, "x")
while not wandb.receive_status():
    time.sleep(0.02)
JsonLines(folder / "metrics.jsonl").write({"kind": "train", "epoch": 0, "step": 1, "loss": 2.5})
print("open", flush=True)
time.sleep(600)
"""


def started_parent(folder: Path) -> subprocess.Popen[str]:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "open\n"
    return parent


@pytest.mark.slow
def test_the_parents_death_ends_it(tmp_path: Path, mark: str) -> None:
    with started_parent(tmp_path) as parent:
        assert processes_with(mark, "wandb-core")
        parent.kill()
    wait_until(lambda: not processes_with(mark), seconds=15)
    records = offline_records(tmp_path)
    assert logged_rows([each["item"] for each in records["history"]]) == [{"step": 1, "epoch": 0, "loss": 2.5}]
    assert [record["exit_code"] for record in records["exit"]] == [1]


@pytest.mark.slow
def test_the_child_of_a_killed_launcher_leaves_a_retry_alone(
    tmp_path: Path, mark: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It comes to its end while the retry, in the same run folder, has begun already."""
    with started_parent(tmp_path) as parent:
        late = processes_with(mark, FEED)
        for pid in late:
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
    retry = start(tmp_path, "offline")
    wait_until(retry.receive_status)
    for pid in late:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not {*late} & {*processes_with(mark, FEED)})
    wandb_runs.write_records(tmp_path, [END])
    retry.finish()
    [own] = tmp_path.glob("wandb/offline-run-*-exec-task-7")
    assert own.name in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "killed"),
    [("online", FEED), ("offline", "wandb-core"), pytest.param("offline", FEED, marks=pytest.mark.exhaustive)],
)
def test_a_killed_wandb_is_started_again_and_its_run_is_kept(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    mode: str, killed: str,
) -> None:  # fmt: skip
    with served(monkeypatch):
        wandb = start(tmp_path, mode)
        wait_until(wandb.receive_status)
        for pid in processes_with(mark, killed):
            os.kill(pid, signal.SIGKILL)
        write_run(tmp_path)
        wandb.finish()
        # wandb's monitor, orphaned by a kill, looks for wandb every few seconds, and ends.
        wait_until(lambda: processes_with(mark) == processes_with(mark, "wandb-symon"))
    check_kept_offline(tmp_path, capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", ["", pytest.param(FEED, marks=pytest.mark.exhaustive)])
def test_a_process_that_hangs_is_not_waited_for(
    tmp_path: Path, mark: str, stopped: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether every process of wandb hangs or one."""
    wandb = start(tmp_path, "offline", timeout=1)
    wait_until(wandb.receive_status)
    for victim in processes_with(mark, stopped):
        os.kill(victim, signal.SIGSTOP)
    begin = time.monotonic()
    wandb.finish()
    assert time.monotonic() - begin < 2
    wait_until(lambda: not processes_with(mark), seconds=15)
    assert capsys.readouterr().err.startswith("wandb: kept offline")


def test_wandb_that_cannot_start_is_printed_and_not_raised(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Because it is disabled, not installed, or cannot make its folder."""
    assert start_wandb(tmp_path, wandb_runs.settings("disabled"), HYPERPARAMETERS, "a name") is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/wandb.py").write_text("raise ModuleNotFoundError(\"No module named 'wandb'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    wandb = start(tmp_path, "offline")
    write_run(tmp_path)
    wandb.finish()
    assert processes_with(mark) == {}
    said = capsys.readouterr().err
    assert said.startswith("wandb: nothing was logged (ModuleNotFoundError: No module named 'wandb'); see ")
    assert "ModuleNotFoundError" in (tmp_path / "wandb/feed.log").read_text()
    assert (
        start_wandb(tmp_path / "elsewhere/wandb.py", wandb_runs.settings("offline"), HYPERPARAMETERS, "a name") is None
    )
    assert capsys.readouterr().err.startswith("wandb: not started (")
