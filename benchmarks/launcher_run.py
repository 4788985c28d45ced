"""A launch for ``launchers``, by this library or by an engine alone, in a process like ``pyflyte``."""

import json
import os
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
from benchmarks.launcher_ranks import PIDS, RANKS, bare_rank, bare_worker
from benchmarks.own_loop import open_launcher
from benchmarks.running import most_memory
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import RankError
from flyte_ddp.core.runs.run_folder import UNFINISHED
from flyte_ddp.core.runs.work import Launch
from flyte_ddp.core.settings import Settings
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.run import run_training


def bare_spawn(folder: str) -> None:
    from torch.multiprocessing.spawn import spawn

    spawn(bare_rank, (folder,), RANKS)  # type: ignore[no-untyped-call]


def bare_elastic(folder: str) -> None:
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
    import ray

    ray.get([ray.remote(bare_rank).options(num_cpus=1).remote(rank, folder) for rank in range(RANKS)])


def bare_dask(client: Any, folder: str) -> None:
    workers = list(client.scheduler_info(n_workers=-1)["workers"])
    client.gather([client.submit(bare_rank, rank, folder, workers=[workers[rank]]) for rank in range(RANKS)])


@contextmanager
def engine(name: str) -> Iterator[tuple[Launch, Callable[[str], None]]]:
    """Yield our launcher and the bare one, on a cluster that stands."""
    if name == "spawn":
        from flyte_ddp.core.launch import spawn

        yield spawn.launch, bare_spawn
        return
    with open_launcher(name) as (launch, client):
        bare: dict[str, Callable[[str], None]] = {"elastic": bare_elastic, "ray": bare_ray}
        yield launch, bare.get(name, partial(bare_dask, client))


def main(request: str) -> None:
    """Run the JSON request, and write the measurements to ``found.json``."""
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
    found["memory"] = most_memory() / (1 << 20)
    (folder / "found.json").write_text(json.dumps(found))


def ours(order: dict[str, Any], run: Path, launch: Launch, began: float) -> dict[str, float]:
    changes = {"first step": {"max_steps": 1, "log_interval": 1}, "train": {}, "kill": {"max_steps": 100_000}}
    hp = Hyperparameters(**{**order["hp"], **changes[order["what"]]})
    killed: list[float] = []
    if order["what"] == "kill":
        threading.Thread(target=kill_rank_1, args=(run, killed), daemon=True).start()
    try:
        settings = Settings(progress="off", wandb_mode="disabled", restarts=0)
        run_training(hp, Path(order["data"]), run, settings, launch=launch)
    except RankError:
        return {"seconds": time.time() - killed[0]}
    records = read_records(run / "metrics.jsonl")
    first = next(record for record in records if record["kind"] == "train")
    return {"seconds": first["time"] - began, "rate": records[-1]["samples_per_second"]}


def kill_rank_1(run: Path, killed: list[float]) -> None:
    """Kill rank 1 after the run's first record, and store the time."""
    metrics = run / UNFINISHED / "metrics.jsonl"
    while not metrics.exists() or '"train"' not in metrics.read_text():
        time.sleep(0.01)
    pid = int((run.parent / "1").read_text())
    killed.append(time.time())
    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
