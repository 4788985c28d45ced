"""Memory is named where the kernel says so."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from processes import wait_until

LIMIT = 2 * 1024**3  # bytes: two ranks and their launcher take 0.7 GiB on digits
VERSION_1 = Path("/sys/fs/cgroup/memory")
MODEL = """
import torch


class Hoarding(torch.nn.Linear):
    def forward(self, images):
        self.hoard = [torch.ones(2**24) for _ in range(200)]
        return super().forward(images.flatten(1))


def model(num_classes, input_shape):
    return Hoarding(64, num_classes)
"""
RUN = """
import sys
from pathlib import Path

Path(sys.argv[1]).write_text("0")
from flyte_ddp import Hyperparameters, run_training
from flyte_ddp.core.errors import RankError
from flyte_ddp.core.settings import Settings

hp = Hyperparameters(model="hoarding:model", epochs=1, num_ranks=2)
try:
    run_training(hp, Path(sys.argv[2]), Path("run"), Settings(progress="off", wandb_mode="disabled"))
except RankError as error:
    print(type(error).__name__, error.recoverable, error, sep=": ")
"""


@contextmanager
def memory_limit(limit: int) -> Iterator[Path]:
    """The file to which a process writes 0 to be limited to so many bytes; skips the test where that is not allowed."""
    is_first = VERSION_1.is_dir()
    folder = (VERSION_1 if is_first else Path("/sys/fs/cgroup")) / f"flyte-ddp-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"a memory cgroup cannot be made here ({error.strerror}), as in most containers")
    try:
        setting = folder / ("memory.limit_in_bytes" if is_first else "memory.max")
        if not setting.exists():
            pytest.skip("the root cgroup does not hand its memory controller on")
        setting.write_text(str(limit))
        yield folder / "cgroup.procs"
    finally:

        def remove() -> bool:  # possible when its last process has ended, which may be after the one that started it
            with suppress(OSError):
                folder.rmdir()
            return not folder.is_dir()

        wait_until(remove, 30)


@pytest.mark.slow
def test_of_a_rank_that_the_kernel_kills_memory_is_named(digits: Path, tmp_path: Path) -> None:
    (tmp_path / "hoarding.py").write_text(MODEL)
    with memory_limit(LIMIT) as processes:
        command = [sys.executable, "-c", RUN, str(processes), str(digits)]
        run = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False)
    assert run.stdout.startswith("OutOfMemoryError: True: rank "), run.stderr
    assert " was killed by SIGKILL, as memory ran out (by the kernel's count" in run.stdout
