"""User-defined data sets whose callables and items start processes, named in tests as ``own_processes:...``."""

import math
import multiprocessing
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import DataLoader

from flyte_ddp import on_demand, run_training
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.settings import Settings
from flyte_ddp.datasets import fetch
from flyte_ddp.datasets.on_demand_set import OnDemand

open_pools: list[Any] = []  # never closed
DEFAULTS = [signal.SIG_DFL, signal.default_int_handler, signal.SIG_DFL, set()]


def find_signals(_: int = 0) -> list[Any]:
    """Return this process's handlers of SIGTERM, SIGINT and SIGUSR1, and the signals that it blocks."""
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    return [*handlers, signal.pthread_sigmask(signal.SIG_BLOCK, ())]


def use_pool() -> None:
    assert multiprocessing.get_start_method() == multiprocessing.get_all_start_methods()[0]
    with multiprocessing.Pool(2) as pool:  # ends by Pool.terminate()
        assert pool.map(find_signals, range(4)) == [DEFAULTS] * 4


def use_open_pool() -> None:
    open_pools.append(multiprocessing.Pool(1))
    assert open_pools[-1].map(find_signals, [0]) == [DEFAULTS]


def use_executor() -> None:
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        assert [*pool.map(find_signals, range(4))] == [DEFAULTS] * 4


def use_spawn() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(find_signals, [0]) == [DEFAULTS]


def use_dataloader() -> None:
    assert len([*DataLoader(range(4), num_workers=2)]) == 4  # type: ignore[arg-type]


def use_subprocess() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen(["sleep", "1000"]) as program:
            program.send_signal(number)
            assert program.wait(20) == -number


def use_joblib() -> None:
    from joblib import Parallel, delayed

    assert Parallel(2)(delayed(find_signals)(number) for number in range(4)) == [DEFAULTS] * 4


USES = {
    use.__name__.removeprefix("use_"): use
    for use in (use_pool, use_open_pool, use_executor, use_spawn, use_dataloader, use_subprocess, use_joblib)
}


class Starting:
    """A set in which every eighth item starts processes."""

    def __init__(self, use: str, samples: int) -> None:
        self.use, self.samples = use, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> tuple[Any, int]:
        if number % 8 == 0:
            USES[self.use]()
        return np.float32([number, 1]), number % 2


def starting(source: str) -> OnDemand:
    use = Path(source).name
    USES[use]()
    return on_demand(Starting(use, 16), Starting(use, 8), classes="ab")


class Dividing:
    """A set that gives each rank a share of its samples, as litdata's StreamingDataset does."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return math.ceil(self.samples / (dist.get_world_size() if dist.is_initialized() else 1))

    def __getitem__(self, number: int) -> tuple[Any, int]:
        return np.float32([number, 1]), number % 2


def dividing(source: str) -> OnDemand:
    return on_demand(Dividing(17), Dividing(8), classes="ab")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores SIGINT for background processes
    use, num_ranks, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    (folder / use).touch()
    hp = Hyperparameters(dataset="own_processes:starting", data_source=str(folder / use), model="window_tasks:linear")
    hp = replace(hp, num_ranks=num_ranks, epochs=1, batch_size=8, validation_fraction=0.25)
    data = fetch(hp.dataset, hp.data_source, folder / "data", progress="off")
    print(run_training(hp, data, folder / "run", Settings(progress="off"), threads=1).run_folder)
