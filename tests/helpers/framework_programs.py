"""Programs of examples/ in ranks: with a rank that is killed once, and with checks of what frameworks leave alone."""

import importlib
import os
import signal
from pathlib import Path

import torch
from processes import wait_until

from flyte_ddp.loops.current_rank import CurrentRank
from flyte_ddp.runs.checkpoint import newest_step


def train(program: str, marker: Path | None = None, at: int = 0) -> dict[str, float]:
    """Call a program's main function; return its measures.

    Rank 1 is killed when it has recorded step ``at``, and something is saved, unless the marker is there.
    """
    threads, record = torch.get_num_threads(), CurrentRank.record

    def record_or_die(self: CurrentRank, step: int, **values: float) -> None:
        record(self, step, **values)
        if self.rank == 1 and step == at and marker is not None and not marker.exists():
            wait_until(lambda: newest_step(self.folder))
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    CurrentRank.record = record_or_die  # type: ignore[method-assign]
    measures: dict[str, float] = importlib.import_module(program).main()
    assert torch.get_num_threads() == threads
    return measures


def timeout_of_lightning() -> float:
    """Return the seconds that Lightning's ranks wait for others unless the program says something else."""
    from lightning.pytorch.strategies import DDPStrategy

    return DDPStrategy()._timeout.total_seconds()


def processes_of_accelerate() -> int:
    """Return how many ranks Accelerate has found, and wait for all."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    accelerator.wait_for_everyone()
    return accelerator.num_processes
