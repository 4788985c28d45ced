"""One launch for ``launchers``: of ours, or of an engine's own, in a process that stands for ``pyflyte``."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import workflows.training  # noqa: F401
from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import RankError
from flyte_ddp.run import run_training
from flyte_ddp.settings import Settings

PIDS = "FLYTE_DDP_BENCHMARK_PIDS"  # environment: a folder, where each rank says which process it is
RANKS = 2


def tutorial(num_classes: int, input_shape: tuple[int, int, int]) -> Any:
    """The tutorial's network, in ranks that say who they are."""
    from flyte_ddp.distributed import rank
    from flyte_ddp.images import InputSpec
    from flyte_ddp.models import Tutorial

    Path(os.environ[PIDS], str(rank())).write_text(str(os.getpid()))
    channels, height, width = input_shape
    return Tutorial(num_classes, InputSpec(channels, height, width, (0.0,) * channels, (1.0,) * channels))


def bare_rank(rank: int, folder: str) -> None:
    """Forms a group and takes a step; rank 0 notes when it was done."""
    import torch
    from torch import distributed, nn
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
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
    """The same, in a worker of Elastic's."""
    bare_rank(int(os.environ["RANK"]), folder)


def bare_spawn(folder: str) -> None:
    """torch's own."""
    from torch.multiprocessing.spawn import spawn

    spawn(bare_rank, (folder,), RANKS)  # type: ignore[no-untyped-call]


def bare_elastic(folder: str) -> None:
    """torch's own."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=RANKS,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        monitor_interval=0.1,
        max_restarts=0,
    )
    elastic_launch(config, bare_worker)(folder)


def bare_ray(folder: str) -> None:
    """Two tasks."""
    import ray

    ray.get([ray.remote(bare_rank).options(num_cpus=1).remote(rank, folder) for rank in range(RANKS)])


def bare_dask(client: Any, folder: str) -> None:
    """Two tasks, each on a worker of its own."""
    workers = list(client.scheduler_info(n_workers=-1)["workers"])
    client.gather([client.submit(bare_rank, rank, folder, workers=[workers[rank]]) for rank in range(RANKS)])


@contextmanager
def engine(name: str) -> Iterator[tuple[Callable[..., None], Callable[[str], None]]]:
    """Our launcher and the bare one, on a cluster that stands."""
    if name == "spawn":
        from flyte_ddp.launch import spawn

        yield spawn.launch, bare_spawn
    elif name == "elastic":
        from flyte_ddp.launch import elastic

        yield elastic.launch, bare_elastic
    elif name == "ray":
        from flyte_ddp.launch import ray

        with ray.connected():
            yield ray.launch, bare_ray
    else:
        from flyte_ddp.launch import dask

        with dask.connected(num_ranks=RANKS) as client:
            yield partial(dask.launch, client=client), partial(bare_dask, client)


def main(request: str) -> None:
    """Runs what the request (JSON) says, and leaves what was measured in ``found.json``."""
    order = json.loads(request)
    folder = Path(order["folder"])
    folder.mkdir(parents=True)
    os.environ[PIDS] = str(folder)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with engine(order["engine"]) as (launch, bare), tempfile.TemporaryDirectory() as own:
        began = time.time()
        if order["what"] == "bare":
            bare(own)
            found = {"seconds": float(Path(own, "stepped").read_text()) - began}
        else:
            found = ours(order, folder / "run", launch, began)
    found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    (folder / "found.json").write_text(json.dumps(found))


def ours(order: dict[str, Any], run: Path, launch: Callable[..., None], began: float) -> dict[str, float]:
    """Trains; what was measured."""
    changes = {"first step": {"max_steps": 1, "log_interval": 1}, "train": {}, "kill": {"max_steps": 100_000}}
    hp = Hyperparameters(**{**order["hp"], **changes[order["what"]]})
    killed: list[float] = []
    if order["what"] == "kill":
        threading.Thread(target=kill_rank_1, args=(run, killed), daemon=True).start()
    try:
        run_training(hp, Path(order["data"]), run, Settings(progress="off", wandb_mode="disabled"), launch=launch)
    except RankError:
        return {"seconds": time.time() - killed[0]}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first = next(record for record in records if record["kind"] == "train")
    return {"seconds": first["time"] - began, "rate": records[-1]["samples_per_second"]}


def kill_rank_1(run: Path, killed: list[float]) -> None:
    """Kills it when the run has come to its first record, and notes when that was."""
    while not (run / "metrics.jsonl").exists() or '"train"' not in (run / "metrics.jsonl").read_text():
        time.sleep(0.01)
    pid = int((run.parent / "1").read_text())
    killed.append(time.time())
    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
