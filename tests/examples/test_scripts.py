"""The examples as users start them, by the commands that they print, in processes of their own."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli import DEADLINE, ROOT, WORKFLOWS, pyflyte, surroundings
from engines import RAY_ENVIRONMENT
from processes import wait_until

from examples.finetune import photos
from examples.sample_data import write_image_folder
from flyte_ddp.datasets.packing import pack_image_folder
from flyte_ddp.text.json_lines import read_records

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
FOLDER = "--folder", "run"


def start(folder: Path, program: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start ``examples/NAME/NAME.py`` or another program in a folder of the test, which is its home, too."""
    path = ROOT / "examples" / (program if program.endswith(".py") else f"{program}/{program}.py")
    surrounding = {**surroundings(folder, folder / "runs"), **RAY_ENVIRONMENT, "FLYTE_DDP_PROGRESS": "off"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, str(path), *arguments]
    return subprocess.Popen(command, cwd=folder, env=surrounding | environment, text=True, **pipes)


def run(folder: Path, program: str, *arguments: str, **environment: str) -> str:
    """Run an example to its end; return its standard output."""
    with start(folder, program, *arguments, **environment) as process:
        output, errors = process.communicate()
    assert process.returncode == 0, errors
    return output


def test_after_a_kill_the_same_command_goes_on(tmp_path: Path) -> None:
    often = {"FLYTE_DDP_CHECKPOINT_SECONDS": "1e-6"}
    with start(tmp_path, "tutorial", *FOLDER, **often) as killed:
        wait_until(lambda: [*(tmp_path / "run/checkpoints").glob("*.ckpt")], DEADLINE)
        killed.send_signal(signal.SIGKILL)
    assert "accuracies" in run(tmp_path, "tutorial", *FOLDER, **often)
    starts = [each for each in read_records(tmp_path / "run/metrics.jsonl") if each["kind"] == "start"]
    assert starts[-1]["resumed_after_step"] > 0
    assert (tmp_path / "run/mnist_cnn.pt").exists()


def test_the_tutorial_as_a_workflow(tmp_path: Path) -> None:
    words = "pytorch_training_wf", "--hp", '{"epochs": 1}'
    ended = pyflyte("run", str(ROOT / "examples/tutorial/workflow.py"), *words, home=tmp_path / "home")
    assert ended.exit_code == 0, ended.output
    assert "epoch_accuracies=[0." in ended.output


def test_others_run_with_their_defaults_and_small_data(tmp_path: Path) -> None:
    images = write_image_folder(tmp_path / "images", 100)
    pack_image_folder(str(images), tmp_path / "shards", progress="off")
    assert "[(" in run(tmp_path / "1", "custom_ddp", *FOLDER)
    assert "[" in run(tmp_path / "2", "wids_ray", *FOLDER, "--index", str(tmp_path / "shards/train.json"))
    assert "loss" in run(tmp_path / "3", "dask_s3", *FOLDER, "--images", str(images))


def test_ranks_and_resumed_runs_have_the_weights_of_one_process(tmp_path: Path) -> None:
    torch_ddp, parts = run(tmp_path, "exact").split("PartAverage")
    failed = r"    rank 2: RuntimeError: as if the machine had failed; goes on on {} ranks\n"
    name = r"    3 ranks and one process: "
    same = r"    never stopped and resumed: equal bit for bit\n"
    match = re.fullmatch(rf"DistributedDataParallel\n{failed.format(3)}{name}differ by (.*)\n{same}", torch_ddp)
    assert match, torch_ddp
    assert float(match[1]) < 1e-5  # rounding of fp32
    assert re.fullmatch(rf", 4 parts\n{failed.format(2)}{name}equal bit for bit\n{same}", parts), parts


def test_stars_are_known_by_what_was_learnt_of_polygons(tmp_path: Path) -> None:
    program, hp = "finetune/photos.py", "examples/finetune/hp.json"
    printed = re.findall(r"^    (p.*)$", photos.__doc__ or "", re.MULTILINE)
    command = f"pyflyte run workflows/training.py training_wf --hp {hp}"
    assert printed == [f"python examples/{program}", command]
    run(tmp_path, program)
    words = "run", WORKFLOWS, "training_wf", "--hp", str(ROOT / hp)
    ended = pyflyte(*words, home=tmp_path / "home", directory=tmp_path)
    assert ended.exit_code == 0, ended.output
    [accuracy] = re.findall(r"test accuracy ([\d.]+)%; made in", ended.output)
    assert float(accuracy) > 80  # 42 % without the weights
    [finetuned] = (tmp_path / "home/runs").glob("*/model.pt")
    base, found = (
        torch.load(path, weights_only=True) for path in (tmp_path / "runs/finetune/base/model.pt", finetuned)
    )
    assert {name for name in base if torch.equal(base[name], found[name])} == {
        f"{layer}.{kind}" for layer in ("conv1", "conv2") for kind in ("weight", "bias")
    }
