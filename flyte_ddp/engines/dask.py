"""Launches ranks on the workers of a Dask cluster. Each worker starts one rank as a process."""

import itertools
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from flyte_ddp.core.checks.parsing import JsonObject
from flyte_ddp.core.errors import UnreachableError, UserError, require_extra
from flyte_ddp.core.launch.engine import (
    END_SECONDS,
    LOOPBACK,
    RankInfo,
    agent_start_error,
    open_rendezvous,
    pack_sources,
    run_agent,
)
from flyte_ddp.core.machine import resources
from flyte_ddp.core.machine.process import hide_main_script
from flyte_ddp.core.machine.resources import MOST_CPU_RANKS, Request, World
from flyte_ddp.core.runs.work import Work
from flyte_ddp.core.user_code.digest import ARITHMETIC
from flyte_ddp.engines import capacity

SCHEDULER = "DASK_SCHEDULER_ADDRESS"  # Dask's variable
WORKERS = "workers of the Dask cluster"
REACH_SECONDS = 10.0  # for a scheduler to answer
DEVICES = "CUDA_VISIBLE_DEVICES"
# For a cluster that only ranks use. Dask's monitoring took an eighth of a core with two idle workers, because Dask
# checks the clock 50 times a second in each process, and profiles tasks and the machine (benchmarks/README.md).
LESS_MONITORING = {
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.system-monitor.interval": "5s",
    "distributed.worker.profile.enabled": False,
}


def launch(work: Work, *, client: Any = None, retries: int = 0, awaited_hosts: int = 0) -> None:
    """Run the work as one Dask task for each rank, on separate workers, and wait for the end.

    Uses as few hosts as possible. Waits up to ``work.settings.timeout`` seconds for ``awaited_hosts`` workers, or for a
    worker for each rank. May run fewer ranks. After a failure Dask restarts tasks up to ``retries`` times. A lost
    worker ends the run, because its rank cannot run on another worker. At the end waits up to 10 s for the tasks, and
    cancels the rest.

    Without ``client`` uses Dask's current client, else DASK_SCHEDULER_ADDRESS, else a new local cluster. Raises the
    errors of all launchers (:mod:`flyte_ddp.core.launch`).
    """
    with require_extra("dask"):
        from dask import annotate  # type: ignore[attr-defined]
        from dask.delayed import delayed
        from distributed import wait
        from distributed.utils import get_ip

    seconds = work.settings.timeout
    with connected(client, work.request.num_ranks, seconds if awaited_hosts else REACH_SECONDS) as cluster:
        work = work.choose_world(lambda request: plan_world(request, cluster, seconds, awaited_hosts))
        num_ranks = work.world.num_ranks
        scheduler = cluster.scheduler.address.rpartition("//")[2].rpartition(":")[0]
        futures: list[Any] = []
        try:
            with open_rendezvous(work, get_ip(scheduler)) as rendezvous:
                descriptions = read_workers(cluster)
                workers = choose_workers(descriptions, num_ranks)
                devices = choose_gpus(workers, run_on_workers(cluster, os.getenv, DEVICES, workers=workers))
                files = pack_sources(*work.user_code)
                run = wrap_by_value(run_agent)
                tasks = []
                for rank, worker in enumerate(workers):
                    info = RankInfo(rank, num_ranks, devices[rank], work.function, work.world.device_type)
                    ticket = rendezvous.make_ticket(info)
                    with annotate(workers=[worker], allow_other_workers=False, retries=retries):
                        folder = descriptions[worker]["local_directory"]
                        tasks.append(delayed(run, pure=False)(ticket.to_stdin(), files, folder))
                # All at once. Otherwise two runs that start together might each wait for a worker of the other run.
                with translate_cluster_errors(cluster):
                    futures = cluster.compute(tasks, optimize_graph=False)
                rendezvous.run_ranks(lambda: raise_if_task_failed(futures, workers, read_workers(cluster)))
        finally:
            # Agents without a launcher end by themselves. Agents of lost workers have ended already.
            with suppress(Exception), cluster.as_current():  # the wait timed out, or the scheduler is gone
                wait(futures, timeout=END_SECONDS)
            with suppress(Exception):  # Dask raises a bare Exception if the client is closed
                cluster.cancel(futures, force=True)


def raise_if_task_failed(futures: Sequence[Any], workers: Sequence[str], living: Collection[str]) -> None:
    """Raise UnreachableError if a task has failed, or if a worker with a task is not in ``living``. Does not wait."""
    for future, worker in zip(futures, workers, strict=True):
        if future.status == "error":
            raise agent_start_error("a Dask worker", future.exception())
        if worker not in living:
            raise UnreachableError(f"Dask worker {worker} has left the cluster; run again when a new worker has joined")


def plan_world(request: Request, client: Any, seconds: float, awaited_hosts: int = 0) -> World:
    """Return the World for ranks on a cluster's workers, one rank for each worker.

    The ranks use GPUs if every worker sees a GPU. Waits up to ``seconds`` for ``awaited_hosts`` workers. If
    ``awaited_hosts`` is 0, waits for a worker for each rank, and accepts fewer workers. Then prints the smaller number
    of ranks.

    Raises:
        UnreachableError: No worker, or fewer than ``awaited_hosts``, have joined within ``seconds``.
        UserError: A worker has other releases of Python or libraries, or ``backend`` is nccl and a worker has no GPU.
        UserError: The request is exact or ``awaited_hosts`` is given, and there are fewer workers than ranks.
    """
    wanted = max(1, request.num_ranks)
    if awaited_hosts:
        what = f"the Dask cluster has {awaited_hosts} workers"
        wanted = capacity.clamp_ranks(request.num_ranks, awaited_hosts, what, awaited_hosts, exact=True)
    try:
        capacity.wait_for_hosts(lambda: len(read_workers(client)), wanted, WORKERS, seconds)
    except UnreachableError:
        if awaited_hosts or not read_workers(client):
            raise
    workers = read_workers(client)
    refuse_version_mismatch(client, workers)
    gpus = run_on_workers(client, resources.count_gpus)
    has_gpus = bool(gpus) and all(gpus.values())
    lack = "not all workers of the Dask cluster have a GPU"
    device = resources.choose_device_type(request.backend, has_gpus, lack)
    number = awaited_hosts or len(workers)
    most = number if device == "cuda" else min(number, request.most)
    what, exact = f"the Dask cluster has {number} workers", request.exact or awaited_hosts > 0
    num_ranks = capacity.clamp_ranks(request.num_ranks, number, what, most, exact=exact)
    chosen = choose_workers(workers, num_ranks)
    cores = run_on_workers(client, resources.count_cores, workers=chosen)
    on_host = Counter(workers[worker]["host"] for worker in chosen)
    threads = min(max(1, cores[worker] // on_host[workers[worker]["host"]]) for worker in chosen)
    return World(num_ranks, device, threads)


def choose_workers(workers: Mapping[str, Any], num_ranks: int) -> list[str]:
    """Return the addresses of ``num_ranks`` workers on as few hosts as possible, ordered by host.

    If enough workers are idle, returns idle workers. ``workers`` has Dask's descriptions of the workers by address.

    Raises:
        UnreachableError: The cluster has too few workers.
    """
    idle = [address for address in workers if not workers[address]["tasks"]]
    candidates = idle if len(idle) >= num_ranks else [*workers]
    host = {address: workers[address]["host"] for address in candidates}
    on_host = Counter(host.values())
    ordered = sorted(candidates, key=lambda address: (-on_host[host[address]], host[address], address))
    if len(ordered) < num_ranks:
        raise UnreachableError(
            f"num_ranks={num_ranks}: the Dask cluster has {len(ordered)} workers, and each worker runs one rank; "
            "add workers, or lower num_ranks"
        )
    return ordered[:num_ranks]


def choose_gpus(workers: Sequence[str], visible: Mapping[str, str | None]) -> list[int]:
    """Return the number of each worker's GPU among the GPUs that the worker sees.

    ``visible`` is CUDA_VISIBLE_DEVICES by address. Workers of a host with equal values get 0, 1, 2. dask-cuda sets a
    different value for each worker, so each worker gets 0.
    """
    numbers: dict[tuple[str, str], Iterator[int]] = defaultdict(itertools.count)
    return [next(numbers[worker.rpartition(":")[0], visible.get(worker) or ""]) for worker in workers]


def refuse_version_mismatch(client: Any, workers: Iterable[str]) -> None:
    """Raise UserError if a worker has another release of Python or of a library that determines rounding (ARITHMETIC).

    Releases of Python are compared by two numbers, such as 3.12.
    """
    with translate_cluster_errors(client):
        found = client.get_versions(packages=ARITHMETIC)
    here, there = found["client"]["packages"], found["workers"]
    for name in ("python", *ARITHMETIC):
        parts = 2 if name == "python" else None  # releases of 3.12 are compatible
        for worker in there.keys() & workers:
            other = there[worker]["packages"].get(name)
            if str(other).split(".")[:parts] != str(here.get(name)).split(".")[:parts]:
                why = f"has {name} {other}, but this process has {here.get(name)}"
                raise UserError(f"Dask worker {worker} {why}; use the same image everywhere")


def read_workers(client: Any) -> JsonObject:
    """Return Dask's descriptions of all workers by address, each with the keys of the worker's tasks as "tasks"."""
    with translate_cluster_errors(client):
        workers, tasks = client.sync(client.scheduler.identity, n_workers=-1)["workers"], client.processing()
    return {address: {**worker, "tasks": tasks.get(address, ())} for address, worker in workers.items()}


def run_on_workers(client: Any, function: Callable[..., Any], *arguments: Any, workers: list[str] | None = None) -> Any:
    """Call a function on ``workers`` (None: on all workers), and return the results by the worker's address."""
    with translate_cluster_errors(client):
        return client.run(wrap_by_value(function), *arguments, workers=workers)


def wrap_by_value(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``function`` on workers without this library, or with another release.

    The returned function contains the code of this library that the call needs.
    """
    import cloudpickle  # type: ignore[import-untyped]

    library = sys.modules["flyte_ddp"]
    cloudpickle.register_pickle_by_value(library)
    try:
        content = cloudpickle.dumps(function)
    finally:
        cloudpickle.unregister_pickle_by_value(library)

    def call(*arguments: Any) -> Any:  # cloudpickle pickles a nested function by value, too
        import pickle

        return pickle.loads(content)(*arguments)

    call.__name__ = function.__name__  # the name that Dask shows
    return call


@contextmanager
def translate_cluster_errors(client: Any) -> Iterator[None]:
    """Turn an OSError of the block into an UnreachableError.

    If the client is not running, turns any Exception into an UnreachableError.
    """
    try:
        yield
    except Exception as error:
        if client.status == "running" and not isinstance(error, OSError):
            raise
        raise UnreachableError(f"the Dask cluster does not answer ({error}); run again later") from None


@contextmanager
def connected(client: Any = None, num_ranks: int = 0, seconds: float = REACH_SECONDS) -> Iterator[Any]:
    """Yield ``client``, or Dask's current client, or a new client for the block.

    A new client connects to DASK_SCHEDULER_ADDRESS. If the variable is not set, starts a local cluster with
    ``num_ranks`` workers (0: one for each GPU, or up to 4 on CPUs). Closes the new client and cluster after the block.

    Raises:
        UnreachableError: No scheduler answers at DASK_SCHEDULER_ADDRESS within ``seconds``.
        UserError: Dask is not installed.
    """
    with require_extra("dask"):
        from dask import config
        from distributed import Client, LocalCluster, default_client

    if client is None:
        with suppress(ValueError):
            client = default_client()
    if client is not None:
        yield client
        return
    with ExitStack() as stack:
        if address := os.environ.get(SCHEDULER):
            try:
                client = Client(address, timeout=seconds)
            except OSError as error:
                raise UnreachableError(
                    f"{SCHEDULER}={address}: no scheduler answers ({error}); start a scheduler, or correct the address"
                ) from None
        else:
            workers = num_ranks or resources.count_gpus() or min(resources.count_cores(), MOST_CPU_RANKS)
            with hide_main_script(), config.set(LESS_MONITORING):
                cluster = LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=f"{LOOPBACK}:0")
            client = Client(stack.enter_context(cluster))
        yield stack.enter_context(client)
