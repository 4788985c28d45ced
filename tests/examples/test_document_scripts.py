"""The programs of the documents as users start them: ``python examples/NAME/NAME.py``, in a process of their own."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli import DEADLINE, ROOT, pyflyte, surroundings
from engines import RAY_ENVIRONMENT
from processes import wait_until

from examples.sample_data import write_image_folder
from flyte_ddp.datasets.packing import pack_image_folder
from flyte_ddp.json_lines import read_records

pytestmark = pytest.mark.slow


def start(tmp_path: Path, name: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start an example in a folder of the test, with its run in ``run`` there."""
    command = [
        sys.executable,
        str(ROOT / "examples" / name / f"{name}.py"),
        "--folder",
        str(tmp_path / "run"),
        *arguments,
    ]
    surrounding = {**surroundings(tmp_path, tmp_path / "runs"), **RAY_ENVIRONMENT, **environment}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=tmp_path, env=surrounding, text=True, **pipes)


def run(tmp_path: Path, name: str, *arguments: str, **environment: str) -> str:
    """Run an example to its end; return its standard output."""
    with start(tmp_path, name, *arguments, **environment) as process:
        output, errors = process.communicate()
    assert process.returncode == 0, errors
    return output


@pytest.mark.exhaustive
def test_after_a_kill_the_same_command_goes_on(tmp_path: Path) -> None:
    often = {"FLYTE_DDP_CHECKPOINT_SECONDS": "1e-6"}
    with start(tmp_path, "tutorial", **often) as killed:
        wait_until(lambda: [*(tmp_path / "run/checkpoints").glob("*.ckpt")], DEADLINE)
        killed.send_signal(signal.SIGKILL)
    assert "accuracies" in run(tmp_path, "tutorial", **often)
    starts = [each for each in read_records(tmp_path / "run/metrics.jsonl") if each["kind"] == "start"]
    assert starts[-1]["resumed_after_step"] > 0
    assert (tmp_path / "run/mnist_cnn.pt").exists()


@pytest.mark.exhaustive
def test_the_tutorial_as_a_workflow(tmp_path: Path) -> None:
    hp = '{"epochs": 1}'
    ended = pyflyte(
        "run", str(ROOT / "examples/tutorial/workflow.py"), "pytorch_training_wf", "--hp", hp, home=tmp_path / "home"
    )
    assert ended.exit_code == 0, ended.output
    assert "epoch_accuracies=[0." in ended.output


@pytest.mark.exhaustive
def test_others_run_with_their_defaults_and_small_data(tmp_path: Path) -> None:
    images = write_image_folder(tmp_path / "images", 100)
    pack_image_folder(str(images), tmp_path / "shards", progress="off")
    assert "[(" in run(tmp_path / "1", "custom_ddp")
    assert "[" in run(tmp_path / "2", "wids_ray", "--index", str(tmp_path / "shards/train.json"))
    assert "loss" in run(tmp_path / "3", "dask_s3", "--images", str(images))
