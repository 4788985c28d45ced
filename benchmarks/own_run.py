"""One run of a function of own_loop.py for ``launchers``, in a process that has imported flytekit."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import flytekit  # noqa: F401

from benchmarks import own_loop

TASKS = {"DDP task": "benchmarks.own_ddp_task", "Elastic task": "benchmarks.own_elastic_task"}


@contextmanager
def runner(name: str, arguments: list[int]) -> Iterator[tuple[Callable[[], Any], float]]:
    """What runs a function on 2 ranks, on a cluster that stands, and how long its import took."""
    begin = time.time()
    if name in TASKS:
        run: Callable[..., Any] = import_module(TASKS[name]).join_and_add
        yield run, time.time() - begin
        return
    from flyte_ddp import run_ranks

    imported = time.time() - begin
    run = partial(run_ranks, own_loop.join_and_add, num_ranks=2)
    if name == "steps":
        yield partial(run_ranks, own_loop.step_seconds, *arguments, num_ranks=2), imported
    elif name == "spawn":
        yield run, imported
    elif name == "elastic":
        from flyte_ddp.launch import elastic

        yield partial(run, launch=elastic.launch), imported
    elif name == "ray":
        from flyte_ddp.launch import ray

        with ray.connected():
            yield partial(run, launch=ray.launch), imported
    else:
        from flyte_ddp.launch import dask

        with dask.connected(num_ranks=2) as client:
            yield partial(run, launch=partial(dask.launch, client=client)), imported


def main(name: str, output: str, *arguments: str) -> None:
    """Writes what the run returned, when it was called, and the seconds of the import before."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with runner(name, [int(each) for each in arguments]) as (run, imported):
        called = time.time()
        returned = run()
    Path(output).write_text(json.dumps({"import": imported, "called": called, "returned": returned}))


if __name__ == "__main__":
    main(*sys.argv[1:])
