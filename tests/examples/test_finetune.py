"""examples/finetune: its two commands, as its docstring prints them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli import ROOT, WORKFLOWS, pyflyte, surroundings

from examples.finetune import photos

PROGRAM, HP = "examples/finetune/photos.py", "examples/finetune/hp.json"


@pytest.mark.slow
def test_stars_are_known_by_what_was_learnt_of_polygons(tmp_path: Path) -> None:
    [first, second] = re.findall(r"^    (p.*)$", photos.__doc__ or "", re.MULTILINE)
    assert first == f"python {PROGRAM}"
    assert second == f"pyflyte run workflows/training.py training_wf --hp {HP}"
    environment = surroundings(tmp_path / "home", tmp_path / "home/runs")
    done = subprocess.run(
        [sys.executable, ROOT / PROGRAM], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    ended = pyflyte(
        *("run", WORKFLOWS, "training_wf", "--hp", str(ROOT / HP)), home=tmp_path / "home", directory=tmp_path
    )
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
