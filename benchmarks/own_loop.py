"""User-style functions for ``launchers``, and their runners: a script, or a launcher on a running cluster.

Only the standard library is imported at module level, because ranks and workers import this module.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

TASKS = {"DDP task": "benchmarks.own_ddp_task", "Elastic task": "benchmarks.own_elastic_task"}
RECORD_STEPS = 50  # from one record to the next


def join_and_add() -> float:
    """Join by torchrun's variables, add up a number, and return the time of completion."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    distributed.all_reduce(torch.ones(1))
    ended = time.time()
    distributed.destroy_process_group()
    return ended


def step_seconds(blocks: int, steps: int) -> dict[str, list[float]]:
    """Return the seconds of a step in blocks. Plain blocks alternate with blocks that call due() and record().

    Each pair of blocks is followed by a block of the same number of calls alone.
    """
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from flyte_ddp import current_rank

    rank = current_rank()
    rank.join()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = torch.randn(64, 784), torch.randint(10, (64,))
    done = 0

    def train_step() -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return float(loss)  # as a loop that looks at its loss

    def block(*, trains: bool, calls: bool) -> float:
        nonlocal done
        loss, begin = 0.0, time.perf_counter()
        for _ in range(steps):
            done += 1
            if trains:
                loss = train_step()
            if calls:
                rank.due()
                if done % RECORD_STEPS == 0:
                    rank.record(done, loss=loss)
        return (time.perf_counter() - begin) / steps

    block(trains=True, calls=True)  # not counted
    found: dict[str, list[float]] = {"plain": [], "with calls": [], "calls alone": []}
    for number in range(blocks):
        sides = ["plain", "with calls"]
        for side in sides if number % 2 else reversed(sides):
            found[side].append(block(trains=True, calls=side != "plain"))
        found["calls alone"].append(block(trains=False, calls=True))
    return found


@contextmanager
def open_launcher(name: str) -> Iterator[tuple[Any, Any]]:
    """Yield a launcher for 2 ranks on a running cluster, and Dask's client, else None."""
    launcher = import_module(f"flyte_ddp.{'core.launch' if name == 'spawn' else 'engines'}.{name}")
    if name == "dask":
        with launcher.connected(num_ranks=2) as client:
            yield partial(launcher.launch, client=client), client
        return
    with launcher.connected() if name == "ray" else nullcontext():
        yield launcher.launch, None


@contextmanager
def open_runner(name: str, arguments: list[int]) -> Iterator[tuple[Callable[[], Any], float]]:
    """Yield a callable that runs a function on 2 ranks, and the seconds of the import."""
    begin = time.time()
    if name in TASKS:
        task: Callable[..., Any] = import_module(TASKS[name]).join_and_add
        yield task, time.time() - begin
        return
    from flyte_ddp import run_ranks

    imported = time.time() - begin
    if name == "steps":
        yield partial(run_ranks, step_seconds, *arguments, num_ranks=2), imported
        return
    with open_launcher(name) as (launch, _):
        yield partial(run_ranks, join_and_add, num_ranks=2, launch=launch), imported


def run_one(name: str, *arguments: int) -> dict[str, Any]:
    """Return a run's return value, the time of the call, and the seconds of the import before."""
    import flytekit  # noqa: F401

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with open_runner(name, [*arguments]) as (run, imported):
        called = time.time()
        return {"returned": run(), "called": called, "import": imported}


def main(output: str) -> None:
    """Write the time at which the function was done.

    Under torchrun rank 0 writes. Otherwise the function runs on ranks of this library.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ended = join_and_add()
    else:
        from flyte_ddp import run_ranks

        ended = run_ranks(join_and_add, num_ranks=2)
    if os.environ.get("RANK", "0") == "0":
        Path(output).write_text(repr(ended))


if __name__ == "__main__":
    main(sys.argv[1])
