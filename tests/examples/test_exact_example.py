"""examples/exact/exact.py in a process of its own, as a user starts it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli import ROOT, surroundings


@pytest.mark.slow
@pytest.mark.exhaustive
def test_ranks_and_resumed_runs_have_the_weights_of_one_process(tmp_path: Path) -> None:
    environment = {**surroundings(tmp_path, tmp_path / "runs"), "FLYTE_DDP_PROGRESS": "off"}
    command = [sys.executable, ROOT / "examples" / "exact" / "exact.py"]
    done = subprocess.run(command, check=False, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    torch_ddp, parts = done.stdout.split("PartAverage")
    failed = r"    rank 2: RuntimeError: as if the machine had failed; goes on on {} ranks\n"
    name = r"    3 ranks and one process: "
    same = r"    never stopped and resumed: equal bit for bit\n"
    match = re.fullmatch(rf"DistributedDataParallel\n{failed.format(3)}{name}differ by (.*)\n{same}", torch_ddp)
    assert match, torch_ddp
    assert float(match[1]) < 1e-5  # rounding of fp32
    assert re.fullmatch(rf", 4 parts\n{failed.format(2)}{name}equal bit for bit\n{same}", parts), parts
