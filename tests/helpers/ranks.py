"""Run a function of a test in the ranks of a gloo group."""

import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def run_ranks(function: Callable[[Path], None], folder: Path, ranks: int) -> list[int | None]:
    """Run a function in each rank, with one thread, for up to 300 s. Return the exit codes."""
    (folder / "store").unlink(missing_ok=True)  # of an earlier call, whose ranks have ended
    spawn = multiprocessing.get_context("spawn")
    group = [spawn.Process(target=run_rank, args=(function, rank, ranks, folder)) for rank in range(ranks)]
    for process in group:
        process.start()
    for process in group:
        process.join(300)
        process.kill()
    return [process.exitcode for process in group]


def run_rank(function: Callable[[Path], None], rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    function(folder)
    # No rank closes connections that another rank may still use. A barrier of gloo would close them.
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(ranks)])
    os._exit(0)
