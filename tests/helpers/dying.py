"""User-defined functions whose ranks are killed. Each call on rank 0 appends a line to the file ``calls``."""

import os
import signal
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from processes import wait_until
from torch.utils.data import DataLoader, Dataset

from flyte_ddp import current_rank
from flyte_ddp.core.runs import checkpoint


def note_call(folder: str) -> None:
    if current_rank().rank == 0:
        with Path(folder, "calls").open("a") as file:
            print("called", file=file)


def be_killed(folder: str) -> None:
    """Kill rank 1 in each call."""
    note_call(folder)
    current_rank().join()
    if current_rank().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def fail(folder: str) -> None:
    note_call(folder)
    raise ArithmeticError("its own words")


def count_to(last: int, kill_at: list[int], folder: str) -> tuple[int, int]:
    """Count to ``last``, and save each step. Kill rank 1 once at each step of ``kill_at``. Return count and sum."""
    note_call(folder)
    here = current_rank()
    here.join()
    state = here.load() or {"step": 0, "sum": 0}
    for step in range(state["step"] + 1, last + 1):
        state = {"step": step, "sum": state["sum"] + step}
        here.save(step, state)
        killed = Path(folder, f"killed at {step}")
        if here.rank == 1 and step in kill_at and not killed.exists():
            wait_until(partial(is_saved, here.folder, step))
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
    return state["step"], state["sum"]


def leave_a_process(folder: str) -> str:
    """Kill rank 1 once. A child process of rank 1 keeps the connections open.

    Rank 0 creates the file ``noticed`` when a collective operation fails.
    """
    here = current_rank()
    here.join()
    if here.load():
        return "went on"
    here.save(1, {"step": 1})
    if here.rank == 1:
        if os.fork() == 0:
            signal.pause()
        wait_until(partial(is_saved, here.folder, 1))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        Path(folder, "noticed").touch()
        raise
    return "was not disturbed"


class KillsItsLoader(Dataset[int]):
    """Two samples. Reading the last sample kills the loader process once."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        if index == 1 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def lose_a_loader(folder: str) -> list[int]:
    """Read all samples by a process of torch's DataLoader. The last rank's process is killed once."""
    note_call(folder)
    here = current_rank()
    marker = Path(folder, "killed" if here.rank == here.world_size - 1 else "calls")
    return [int(sample) for sample in DataLoader(KillsItsLoader(marker), batch_size=None, num_workers=1)]


def is_saved(folder: Path, step: int) -> bool:
    return checkpoint.find_newest_step(folder) == step
