"""A function that is called directly, or by torchrun: rank 0 of 1, or the rank that torchrun says."""

import os
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import own_functions
import pytest
from cli import HELPERS
from torch.distributed import TCPStore

SUMS = "{'sum': 10.0, 'begun': [(0, 0.0), (0, 0.0)]}"
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
    assert "could not be written" not in ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_called_directly(tmp_path: Path) -> None:
    got, folder = run_script(tmp_path, DIRECT).splitlines()
    assert got == "{'sum': 10.0, 'begun': [(0, 0.0)]}"
    assert not Path(folder).exists()


def train(rank: int, port: int, folder: Path) -> None:
    """In a process as torchrun starts it."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, TORCHELASTIC_USE_AGENT_STORE="True")
    (folder / str(rank)).write_text(str(own_functions.train(4)))


@pytest.mark.slow
def test_with_torchruns_variables(tmp_path: Path) -> None:
    """Two processes, whose ranks add up, and load what rank 0 saved; torchrun's agent has the store."""
    store, context = TCPStore("localhost", 0, is_master=True, wait_for_workers=False), get_context("spawn")
    ranks = [context.Process(target=train, args=(rank, store.port, tmp_path)) for rank in (0, 1)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == [SUMS] * 2
