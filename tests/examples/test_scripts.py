"""The examples as users start them, by the commands that they print, in processes of their own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli import ROOT, WORKFLOWS, pyflyte, surroundings

from examples.finetune import photos

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


def run(folder: Path, program: str) -> str:
    """Run ``examples/NAME/NAME.py`` or another program in a folder of the test, its home, too; return its output."""
    path = ROOT / "examples" / (program if program.endswith(".py") else f"{program}/{program}.py")
    surrounding = {**surroundings(folder, folder / "runs"), "FLYTE_DDP_PROGRESS": "off"}
    ended = subprocess.run(
        [sys.executable, str(path)], cwd=folder, env=surrounding, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_tutorial_as_a_workflow(tmp_path: Path) -> None:
    words = "pytorch_training_wf", "--hp", '{"epochs": 1}'
    ended = pyflyte("run", str(ROOT / "examples/tutorial/workflow.py"), *words, home=tmp_path / "home")
    assert ended.exit_code == 0, ended.output
    assert "epoch_accuracies=[0." in ended.output


def test_ranks_and_resumed_runs_have_the_weights_of_one_process(tmp_path: Path) -> None:
    torch_ddp, parts = run(tmp_path, "exact").split("PartAverage")
    failed = r"    rank 2: RuntimeError: simulated failure of the machine; resumes on {} ranks\n"
    name = r"    3 ranks and one process: "
    same = r"    uninterrupted and resumed: equal bit for bit\n"
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
    [accuracy] = re.findall(r"test accuracy ([\d.]+)%; written to", ended.output)
    assert float(accuracy) > 80  # 42 % without the weights
    [finetuned] = (tmp_path / "home/runs").glob("*/model.pt")
    base, found = (
        torch.load(path, weights_only=True) for path in (tmp_path / "runs/finetune/base/model.pt", finetuned)
    )
    assert {name for name in base if torch.equal(base[name], found[name])} == {
        f"{layer}.{kind}" for layer in ("conv1", "conv2") for kind in ("weight", "bias")
    }
