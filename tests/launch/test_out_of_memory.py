"""Memory is named where the kernel says so, and only there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from memory_limit import memory_limit

LIMIT = 2 * 1024**3  # bytes: two ranks and their launcher take 0.7 GiB on digits

MODEL = """
import torch


class Hoarding(torch.nn.Linear):
    def forward(self, images):
        if KIND == "hoard":
            self.hoard = [torch.ones(2**24) for _ in range(200)]
        elif torch.distributed.get_rank() == 1:
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(images.flatten(1))


def model(num_classes, input_shape):
    return Hoarding(64, num_classes)
"""

RUN = """
import sys
from pathlib import Path

Path(sys.argv[1]).write_text("0")
from flyte_ddp import Hyperparameters, run_training
from flyte_ddp.errors import RankError
from flyte_ddp.settings import Settings

hp = Hyperparameters(model="hoarding:model", epochs=1, num_ranks=2)
try:
    run_training(hp, Path(sys.argv[2]), Path("run"), Settings(progress="off", wandb_mode="disabled"))
except RankError as error:
    print(type(error).__name__, error, sep=": ")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("hoard", " was killed by SIGKILL, as memory ran out (by the kernel's own count)"),
        pytest.param("another SIGKILL", "RankLostError: rank 1 was killed by SIGKILL\n", marks=pytest.mark.exhaustive),
    ],
)
def test_of_a_rank_that_the_kernel_kills_memory_is_named(digits: Path, tmp_path: Path, kind: str, words: str) -> None:
    (tmp_path / "hoarding.py").write_text(f"KIND = {kind!r}\n{MODEL}")
    with memory_limit(LIMIT) as processes:
        command = [sys.executable, "-c", RUN, str(processes), str(digits)]
        run = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False)
    assert words in run.stdout, run.stderr
    assert ("OutOfMemoryError" in run.stdout) == (kind == "hoard")
