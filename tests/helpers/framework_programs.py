"""Programs of examples/ in ranks, with checks that frameworks leave settings unchanged."""

import importlib

import torch


def train(program: str) -> dict[str, float]:
    """Call a program's main function, and return the measures."""
    threads = torch.get_num_threads()
    measures: dict[str, float] = importlib.import_module(program).main()
    assert torch.get_num_threads() == threads
    return measures


def timeout_of_lightning() -> float:
    """Return the default timeout of Lightning's ranks in seconds."""
    from lightning.pytorch.strategies import DDPStrategy

    return DDPStrategy()._timeout.total_seconds()


def processes_of_accelerate() -> int:
    """Return the number of ranks that Accelerate finds, and wait for all ranks."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    accelerator.wait_for_everyone()
    return accelerator.num_processes
