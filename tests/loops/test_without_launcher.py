"""A function that is called directly, or by torchrun: rank 0 of 1, or the rank that torchrun says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli import HELPERS

DIRECT = """
import own_functions
from flyte_ddp import current_rank
rank = current_rank()
assert (rank.rank, rank.world_size, rank.local_rank, rank.device.type) == (0, 1, 0, "cpu")
assert rank is current_rank() and rank.folder.is_dir()
print(own_functions.train(4))
assert rank.load()["step"] == 4 and not rank.due()
print(rank.folder)
"""
TORCHRUN = """
import own_functions
from flyte_ddp import current_rank
print(own_functions.train(4))
print(own_functions.give("none") is None)
"""


def run_script(folder: Path, text: str, *before: str) -> str:
    """Run a script with an empty folder for temporary files; nothing stays there."""
    script, temporary = folder / "script.py", folder / "temporary"
    script.write_text(text)
    temporary.mkdir()
    environment = {**os.environ, "FLYTE_DDP_PROGRESS": "off", "TMPDIR": str(temporary), "PYTHONPATH": str(HELPERS)}
    command = [sys.executable, *before, str(script)]
    ended = subprocess.run(command, env=environment, cwd=HELPERS, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert [*temporary.glob("flyte-ddp*")] == []
    return ended.stdout


@pytest.mark.slow
def test_called_directly(tmp_path: Path) -> None:
    got, folder = run_script(tmp_path, DIRECT).splitlines()
    assert got == "{'sum': 10.0, 'begun': [(0, 0.0)]}"
    assert not Path(folder).exists()


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    """Two processes, whose ranks add up, and load what rank 0 saved."""
    arguments = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d")
    printed = run_script(tmp_path, TORCHRUN, *arguments, "--rdzv-endpoint", "localhost:0")
    assert printed.count("{'sum': 10.0, 'begun': [(0, 0.0), (0, 0.0)]}") == 2
