"""The function that ranks of ``launchers`` run, in a separate module, so that ranks import nothing else."""

import os
import time
from pathlib import Path
from typing import Any

PIDS = "FLYTE_DDP_BENCHMARK_PIDS"  # environment: a folder, where each rank says which process it is
RANKS = 2


def tutorial(num_classes: int, input_shape: tuple[int, int, int]) -> Any:
    """Return the tutorial's network. Writes the process id of the rank to a file."""
    from flyte_ddp.core.models.inputs import InputSpec
    from flyte_ddp.core.parallel.distributed import rank
    from flyte_ddp.models.zoo import Tutorial

    Path(os.environ[PIDS], str(rank())).write_text(str(os.getpid()))
    channels, height, width = input_shape
    return Tutorial(num_classes, InputSpec(channels, height, width, (0.0,) * channels, (1.0,) * channels))


def bare_rank(rank: int, folder: str) -> None:
    """Form a group and take a step. Rank 0 writes the time of the step."""
    import torch
    from torch import distributed, nn
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    layers = nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(9216, 10)
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = nn.functional.cross_entropy(model(torch.randn(128, 1, 28, 28)), torch.zeros(128, dtype=torch.int64))
    loss.backward()
    optimizer.step()
    if rank == 0:
        Path(folder, "stepped").write_text(repr(time.time()))
    distributed.barrier()
    distributed.destroy_process_group()


def bare_worker(folder: str) -> None:
    bare_rank(int(os.environ["RANK"]), folder)
