"""Programs of examples/ in ranks, with checks of what frameworks leave alone."""

import importlib

import torch


def train(program: str) -> dict[str, float]:
    """Call a program's main function; return its measures."""
    threads = torch.get_num_threads()
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
