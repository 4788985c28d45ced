"""Users' own tasks of Flyte 2 with the configuration DDP, under ``flyte run --local`` and in pods."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import msgpack
import pytest
from cli import ROOT
from flyte2_cli import DEADLINE, FLYTE, Flyte2Ended, flyte, run_task, started, stop, task_words, wait_until
from flyteidl2.core.execution_pb2 import ContainerError

from flyte_ddp.core.errors import UserError

pytestmark = pytest.mark.slow
PROJECT = Path(__file__).parent / "project"
Run = Callable[..., Flyte2Ended]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run ``flyte run --local own2.py TASK OPTIONS`` in the user's project."""
    project = shutil.copytree(PROJECT, tmp_path / "project")
    return lambda task, **inputs: run_task("own2.py", task, tmp_path, directory=project, **inputs)


def test_rank_0s_value_is_the_output_and_the_ranks_compute_together(run: Run, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("a line")
    ended = run("add_up", start=3, data=tmp_path / "data.txt")
    assert "Stats(total=7.0, ranks=2, model=File(path=" in ended.outputs
    [model] = (tmp_path / "runs").glob("own.add_up-*/model.txt")
    assert f"path='{model}'" in ended.outputs
    assert model.read_text() == "a line 7.0"
    records = [json.loads(line) for line in model.with_name("metrics.jsonl").read_text().splitlines()]
    assert [(each["kind"], each.get("loss")) for each in records] == [("start", None), ("record", 2.5), ("end", None)]
    assert re.search(r"own2:add_up has run in \S+/runs/own\.add_up-[\w-]+\n  report\.html ", ended.output), ended.output


def test_an_async_body_runs_and_its_exception_keeps_type_and_message(run: Run) -> None:
    assert run("fail", how="return").outputs == "o0=40"
    ended = run("fail", how="raise")
    assert ended.exit_code == 1
    assert "rank 1: LookupError: rank 1 cannot do that" in ended.panel
    assert "traceback.txt" in ended.panel
    assert ended.output.count("LookupError") == 1, ended.output


@pytest.mark.exhaustive
def test_after_a_killed_rank_the_same_command_goes_on(run: Run) -> None:
    lost = run("learn", steps=5, environment={"FLYTE_DDP_RESTARTS": "0"})
    assert lost.exit_code == 1
    assert "rank 1 was killed by SIGKILL" in lost.panel
    assert "the same command will go on after step 3, which is saved" in lost.panel
    assert run("learn", steps=5).outputs == "o0=[4, 5]"


def test_ctrl_c_gives_the_body_time_to_save(run: Run, tmp_path: Path) -> None:
    words = task_words("own2.py", "go_on", {})
    pressed = stop(tmp_path, FLYTE, words, signal.SIGINT, tmp_path / "project")
    assert pressed.exit_code == 1
    said = re.search(r"stopped by Ctrl-C; the same command will go on after step ([\d,]+), which", pressed.panel)
    assert said, pressed.output
    assert run("go_on").outputs == f"o0={said[1].replace(',', '')}"


@pytest.mark.exhaustive
def test_in_pods_a_lost_rank_is_retried_and_a_users_exception_is_final(
    flyte2: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second attempt goes on from the steps that the first has saved."""
    from flyte.io import File
    from flyte2_pod import Pods  # imports flyte

    monkeypatch.syspath_prepend(PROJECT)
    own = import_module("own2")
    pods = Pods(tmp_path, PROJECT)
    first = pods.run(own.learn, {"steps": 5})
    assert first.error is not None, first.log
    assert first.error.kind == ContainerError.RECOVERABLE
    assert "rank 1 was killed by SIGKILL" in first.error.message
    second = pods.run(own.learn, {"steps": 5}, attempt=1)
    assert second.outputs is not None, second.log
    values = second.outputs["o0"].collection.literals
    assert [each.scalar.primitive.integer for each in values] == [4, 5]

    (tmp_path / "data.txt").write_text("a line")
    added = pods.run(own.add_up, {"start": 3, "data": File(path=str(tmp_path / "data.txt"))})
    assert added.outputs is not None, added.log
    stats = msgpack.unpackb(added.outputs["o0"].scalar.binary.value)
    assert Path(stats["model"]["path"]).read_text() == "a line 7.0"
    assert stats["model"]["name"] == "model.txt", "the SDK had the file to upload"

    failed = pods.run(own.fail, {"how": "raise"})
    assert failed.error is not None, failed.log
    assert failed.error.kind == ContainerError.NON_RECOVERABLE
    assert failed.error.message.startswith("rank 1: LookupError: rank 1 cannot do that")
    assert 'raise LookupError("rank 1 cannot do that")' in failed.error.message, "with its traceback"


def test_local_files_at_any_depth_are_uploaded(flyte2: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    from flyte.io import Dir, File

    from flyteplugins.ddp.task import upload_local_files

    monkeypatch.setattr(File, "from_local_sync", lambda path: f"uploaded {path}")
    monkeypatch.setattr(Dir, "from_local_sync", lambda path: f"uploaded folder {path}")
    here, there, folder = File(path="/a"), File(path="s3://bucket/b"), Dir(path="/c")
    assert upload_local_files((1, here, [there, {"x": folder}])) == (
        1,
        "uploaded /a",
        [there, {"x": "uploaded folder /c"}],
    )
    stats = SimpleStats(here, 2)
    assert upload_local_files(stats) == SimpleStats("uploaded /a", 2)
    assert stats.model is here


@dataclass(frozen=True)
class SimpleStats:
    """A dataclass with a file."""

    model: Any
    ranks: int


def test_a_pod_that_awaits_a_task_leaves_the_task_running_at_sigterm(
    flyte2: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod reports nothing, so Flyte 2 starts another attempt, which finds the awaited task by its inputs."""
    from flyte2_pod import Pods  # imports flyte

    monkeypatch.syspath_prepend(PROJECT)
    begun = tmp_path / "begun"

    def terminate(process: subprocess.Popen[bytes]) -> None:
        wait_until(lambda: begun.exists() or process.poll() is not None, DEADLINE)
        process.terminate()

    task = import_module("own2").wait_for_another_task
    ended = Pods(tmp_path, PROJECT).run(task, {"begun": str(begun)}, during=terminate)
    assert ended.exit_code == 128 + signal.SIGTERM, ended.log
    assert ended.error is None
    assert begun.exists(), "nothing was cancelled"


def test_a_wrong_number_of_ranks_is_refused(flyte2: dict[str, ModuleType]) -> None:
    from flyteplugins.ddp import DDP

    assert DDP() == DDP(num_ranks=0)
    for wrong in (-1, 2.0, True, "2"):
        with pytest.raises(UserError, match="must be a number of ranks"):
            DDP(num_ranks=wrong)  # type: ignore[arg-type]


def test_ctrl_c_outside_of_a_training_ends_the_command_at_once(tmp_path: Path) -> None:
    """The SDK's command alone ends in tracebacks of the thread that runs the task."""
    project = shutil.copytree(PROJECT, tmp_path / "project")
    begun = tmp_path / "begun"
    words = task_words("own2.py", "wait_for_ever", {"begun": begun})
    with started(*words, home=tmp_path, directory=project) as running:
        wait_until(lambda: begun.exists() or running.process.poll() is not None, DEADLINE)
        os.killpg(running.process.pid, signal.SIGINT)
        ended = running.wait()
    assert ended.exit_code == 1, ended.output
    assert "stopped by Ctrl-C; the same command will resume a training from its last checkpoint, if any" in ended.output
    assert "Traceback" not in ended.output


def test_the_program_of_the_page_runs_by_its_command(tmp_path: Path) -> None:
    page = (ROOT / "docs/flyte2.md").read_text()
    [program] = re.findall(r"^```python\n(# my_task\.py\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_task.py").write_text(program)
    [words] = re.findall(r"^flyte (run --local my_task\.py .*)$", page, re.MULTILINE)
    ended = flyte(*words.split(), home=tmp_path, directory=tmp_path)
    assert ended.exit_code == 0, ended.output
    assert "o0=200" in ended.output
    [metrics] = (tmp_path / "runs").glob("*/metrics.jsonl")
    losses = [record["loss"] for record in map(json.loads, metrics.read_text().splitlines()) if "loss" in record]
    assert losses[-1] == 1 / 200


def test_a_second_ctrl_c_ends_the_command_at_once(tmp_path: Path) -> None:
    """The body has FLYTE_DDP_SAVE_SECONDS to save after the first one, and does not use them."""
    project = shutil.copytree(PROJECT, tmp_path / "project")
    begun = tmp_path / "begun"
    words = task_words("own2.py", "never_save", {"begun": begun})
    with started(*words, home=tmp_path, directory=project, FLYTE_DDP_SAVE_SECONDS="1000") as running:
        wait_until(lambda: begun.exists() or running.process.poll() is not None, DEADLINE)
        os.kill(running.process.pid, signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            running.process.wait(1)  # the kernel merges two signals that come at once
        os.kill(running.process.pid, signal.SIGINT)
        ended = running.wait()
    assert ended.exit_code == 1, ended.output
    assert "Traceback" not in ended.output
