"""Launches ranks on the workers of a Dask cluster, one for each worker, as processes that the workers start."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import flyte_ddp
from flyte_ddp import hardware as machine
from flyte_ddp.code_digest import ARITHMETIC
from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UnreachableError, UserError, require_extra
from flyte_ddp.hardware import MOST_CPU_RANKS, Hardware
from flyte_ddp.launch import capacity
from flyte_ddp.launch.remote import agent, sources
from flyte_ddp.launch.remote.rendezvous import JOIN_SECONDS, open_rendezvous
from flyte_ddp.launch.supervise.processes import hide_main_script
from flyte_ddp.launch.supervise.rank_process import RankInfo
from flyte_ddp.runs.job import Job
from flyte_ddp.settings import read_settings

SCHEDULER = "DASK_SCHEDULER_ADDRESS"  # Dask's own variable
WORKERS = "workers of the Dask cluster"
REACH_SECONDS = 10  # for a scheduler to answer
TASKS_PER_THREAD = 10  # Dask expects half a second for each, and wants five seconds of work before it adds workers
DEVICES = "CUDA_VISIBLE_DEVICES"
# For a cluster that only ranks use: Dask's own monitoring took an eighth of a core with two idle workers, as it looks
# at the clock 50 times a second in each process, and profiles tasks and the machine (benchmarks/README.md).
LESS_MONITORING = {
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.system-monitor.interval": "5s",
    "distributed.worker.profile.enabled": False,
}


def launch(job: Job, *, num_ranks: int, client: Any = None, retries: int = 0) -> None:
    """Run the job on ``num_ranks`` workers, on as few hosts as possible, and wait for its end.

    Waits for the workers up to ``job.settings.timeout`` (FLYTE_DDP_TIMEOUT). Sends them this process's sources of the
    library and of the user. Cancels the tasks at the end, and waits up to JOIN_SECONDS for that. Raises the error
    of the rank that failed first.

    Args:
        client: Dask's client of the cluster; None: as :func:`connected` finds it.
        retries: how often Dask starts a task again when it has failed. All ranks then resume from the newest
            checkpoint. Each rank stays on its worker, so a lost worker ends the run.
    """
    with require_extra("dask"):
        from dask import annotate  # type: ignore[attr-defined]
        from dask.delayed import delayed
        from distributed import wait
        from distributed.utils import get_ip

    with connected(client, num_ranks) as cluster:
        scheduler = cluster.scheduler.address.rpartition("//")[2].rpartition(":")[0]
        futures: list[Any] = []
        try:
            with open_rendezvous(job, get_ip(scheduler)) as rendezvous:
                with request_workers(cluster, num_ranks) as count:
                    capacity.wait_for_hosts(count, num_ranks, WORKERS, job.settings.timeout)
                    descriptions = worker_descriptions(cluster)
                    workers = choose_workers(descriptions, tasks_by_worker(cluster), num_ranks)
                    refuse_version_mismatch(cluster, workers)
                    devices = choose_gpus(workers, run_on_workers(cluster, os.getenv, DEVICES, workers=workers))
                    files, run = sources.pack_sources(job.hp), pickle_by_value(agent.run_agent_with_sources)
                    tasks = []
                    for rank, worker in enumerate(workers):
                        stdin = agent.agent_stdin(rendezvous.make_ticket(RankInfo(rank, num_ranks, devices[rank])))
                        with annotate(workers=[worker], allow_other_workers=False, retries=retries):
                            folder = descriptions[worker]["local_directory"]
                            tasks.append(delayed(run, pure=False)(files, stdin, folder))
                    # All at once: if two runs start together, no worker gets ranks of both in different orders.
                    with translate_cluster_errors(cluster):
                        futures = cluster.compute(tasks, optimize_graph=False)
                rendezvous.run_ranks(
                    num_ranks, lambda: raise_if_task_failed(futures, workers, worker_descriptions(cluster))
                )
        finally:
            # Agents have no launcher any more, so they end by themselves; those of lost workers have ended.
            with suppress(Exception):  # the time is over, or there is no scheduler any more
                wait(futures, timeout=JOIN_SECONDS)
            with suppress(Exception):  # Dask raises a bare Exception if the client is closed
                cluster.cancel(futures, force=True)


def hardware(hp: Hyperparameters, client: Any, *, coming: int = 0, seconds: float | None = None) -> Hardware:
    """Return the Hardware for ranks on the workers: a GPU for each if all workers see one, and a share of host's cores.

    Waits for as many workers as ranks are requested, or for one.

    Args:
        client: Dask's client of the cluster.
        coming: how many workers the cluster will have at least; fewer ranks than requested are then an error. 0: not
            known; when the wait is over, fewer ranks will do.
        seconds: limit of the wait; None: FLYTE_DDP_TIMEOUT.

    Raises:
        UserError: the hyperparameters do not fit the cluster, or workers have other versions.
        UnreachableError: too few workers have come in time, or the cluster does not answer.
    """
    wanted = max(1, hp.num_ranks)
    if coming:
        what = f"the Dask cluster has {coming} workers"
        wanted = capacity.clamp_ranks(hp.num_ranks, coming, what, coming, exact=True)
    with request_workers(client, wanted) as count:
        try:
            capacity.wait_for_hosts(count, wanted, WORKERS, read_settings().timeout if seconds is None else seconds)
        except UnreachableError:
            if coming or not count():
                raise
        workers = worker_descriptions(client)
        refuse_version_mismatch(client, workers)
        gpus = run_on_workers(client, machine.count_gpus)
        has_gpus = bool(gpus) and all(gpus.values())
        device = capacity.choose_device_type(hp.backend, has_gpus, "not all workers of the Dask cluster have one")
        number = coming or len(workers)
        most = number if device == "cuda" else min(number, hp.batch_size)
        what = f"the Dask cluster has {number} workers"
        num_ranks = capacity.clamp_ranks(hp.num_ranks, number, what, most, exact=coming > 0)
        used = choose_workers(workers, tasks_by_worker(client), num_ranks)
        cores = run_on_workers(client, machine.count_cores, workers=used)
        bf16 = run_on_workers(client, machine.bf16_support, device, workers=used)
    on_host = Counter(workers[worker]["host"] for worker in used)
    threads = min(max(1, cores[worker] // on_host[workers[worker]["host"]]) for worker in used)
    return machine.choose_hardware(hp, device, num_ranks, threads=threads, bf16=min(bf16.values()))


@contextmanager
def request_workers(client: Any, wanted: int) -> Iterator[Callable[[], int]]:
    """Make an adaptive cluster start workers, and keep them until the end of the block.

    An adaptive cluster starts workers for waiting tasks only. So it gets tasks that need a resource that no worker has.
    They are cancelled at the end.

    Yields:
        A function that returns the number of workers. While they are fewer than wanted, it submits such tasks.
    """
    tasks: list[Any] = []

    def count() -> int:
        """Return the number of workers; while it is too small, submit tasks that none of them can run."""
        workers = worker_descriptions(client)
        threads = max((worker["nthreads"] for worker in workers.values()), default=1)
        more = range(len(tasks), wanted * threads * TASKS_PER_THREAD)
        if more and len(workers) < wanted:
            with translate_cluster_errors(client):
                tasks.extend(client.map(abs, more, pure=False, resources={"of no worker": 1}))
        return len(workers)

    try:
        yield count
    finally:
        with suppress(Exception):  # Dask raises a bare Exception if the client is closed
            client.cancel(tasks, force=True)


def run_on_workers(
    client: Any, function: Callable[..., Any], *arguments: Any, workers: Sequence[str] | None = None
) -> Any:
    """Call a function on each of these workers, or on all, and return its results by worker address.

    A function of this library is pickled by value, so the workers need not have the library. Raises UnreachableError
    if the cluster does not answer.
    """
    with translate_cluster_errors(client):
        return client.run(pickle_by_value(function), *arguments, workers=workers)


def pickle_by_value(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of this library wrapped so that workers without this library, or with another one, can call it.

    It is pickled with the functions that it calls. Modules that it imports while it runs must exist on the worker.
    """
    import cloudpickle  # type: ignore[import-untyped]

    cloudpickle.register_pickle_by_value(flyte_ddp)
    try:
        content = cloudpickle.dumps(function)
    finally:
        cloudpickle.unregister_pickle_by_value(flyte_ddp)

    def call(*arguments: Any) -> Any:  # cloudpickle pickles a nested function by value, too
        import pickle

        return pickle.loads(content)(*arguments)

    call.__name__ = function.__name__  # which Dask shows
    return call


def refuse_version_mismatch(client: Any, workers: Iterable[str]) -> None:
    """Raise UserError if a worker has another Python, torch or torchvision than this process."""
    with translate_cluster_errors(client):
        found = client.get_versions(packages=ARITHMETIC)
    here = format_versions(found["client"])
    for worker in workers:
        if worker in found["workers"] and (other := format_versions(found["workers"][worker])) != here:
            raise UserError(f"Dask worker {worker} has {other}, and this process {here}; use one image for all")


def format_versions(found: Mapping[str, Any]) -> str:
    """Return Dask's versions of a process as text, such as ``python 3.12, torch 2.15.0, torchvision 0.29.2``."""
    releases = found["packages"]
    python = ".".join(releases["python"].split(".")[:2])
    return ", ".join([f"python {python}", *(f"{name} {releases[name]}" for name in ARITHMETIC if releases.get(name))])


@contextmanager
def connected(client: Any = None, num_ranks: int = 0, seconds: float | None = None) -> Iterator[Any]:
    """Yield a Dask client: the given one, Dask's current one, or a new one, which is closed at the end.

    A new one connects to the scheduler of ``DASK_SCHEDULER_ADDRESS``, or to a cluster that is started on this machine
    for the block.

    Args:
        num_ranks: number of workers of a new cluster; 0: one for each GPU, or for each core up to MOST_CPU_RANKS.
        seconds: limit of the wait for a scheduler; None: REACH_SECONDS.

    Raises:
        UserError: Dask is not installed, or the address has not the form tcp://host:port.
        UnreachableError: no scheduler answers at the address.
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
            what = f"{SCHEDULER}={address}"
            try:
                client = Client(address, timeout=seconds or REACH_SECONDS)
            except ValueError as error:
                raise UserError(f"{what}: {error}; give it as tcp://host:port") from None
            except OSError as error:
                raise UnreachableError(
                    f"{what}: no scheduler there ({error}); start one, or correct the address"
                ) from None
        else:
            workers = num_ranks or machine.count_gpus() or min(machine.count_cores(), MOST_CPU_RANKS)
            with hide_main_script(), config.set(LESS_MONITORING):
                cluster = LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=":0")
            client = Client(stack.enter_context(cluster))
        yield stack.enter_context(client)


def worker_descriptions(client: Any) -> dict[str, Any]:
    """Ask the scheduler for its descriptions of the workers, and return them by address.

    Raises UnreachableError if the cluster does not answer.
    """
    with translate_cluster_errors(client):
        workers: dict[str, Any] = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    return workers


def tasks_by_worker(client: Any) -> dict[str, Any]:
    """Ask the scheduler for the tasks that each worker runs, and return them by the worker's address.

    Raises UnreachableError if the cluster does not answer.
    """
    with translate_cluster_errors(client):
        work: dict[str, Any] = client.processing()
    return work


@contextmanager
def translate_cluster_errors(client: Any) -> Iterator[None]:
    """Raise UnreachableError in place of an OSError of the block, and of any exception if the client is not running."""
    where = f" of {client.scheduler.address}" if client.scheduler else ""  # None: Dask has given up the scheduler
    try:
        yield
    except Exception as error:
        if client.status == "running" and not isinstance(error, OSError):
            raise
        raise UnreachableError(f"the Dask cluster{where} does not answer ({error}); run again when it does") from None


def choose_workers(workers: Mapping[str, Any], busy: Mapping[str, Any], num_ranks: int) -> list[str]:
    """Return the addresses of ``num_ranks`` workers, on as few hosts as possible; those of a host are adjacent.

    Args:
        workers: descriptions by address, of which ``host`` is read.
        busy: tasks by address; workers with tasks are chosen only if there are too few without.

    Raises:
        UnreachableError: there are fewer workers than ranks.
    """
    idle = [address for address in workers if not busy.get(address)]
    hosts: dict[str, list[str]] = defaultdict(list)
    for address in sorted(idle if len(idle) >= num_ranks else workers):
        hosts[workers[address]["host"]].append(address)
    by_size = sorted(hosts, key=lambda host: (-len(hosts[host]), host))
    ordered = [address for host in by_size for address in hosts[host]]
    if len(ordered) < num_ranks:
        raise UnreachableError(
            f"num_ranks={num_ranks}: the Dask cluster has {len(ordered)} workers, and each takes one rank; "
            "add workers, or lower num_ranks"
        )
    return ordered[:num_ranks]


def choose_gpus(workers: Sequence[str], visible: Mapping[str, str | None]) -> list[int]:
    """Return for each worker the number of the GPU that its rank takes, of the GPUs that the worker sees.

    Workers of a host that see the same GPUs take 0, 1, 2 and so on. dask-cuda rotates the list, so each takes 0.

    Args:
        visible: the workers' values of CUDA_VISIBLE_DEVICES, by address.
    """
    taken = Counter[tuple[str, str]]()
    numbers = []
    for worker in workers:
        place = (worker.rpartition(":")[0], visible.get(worker) or "")
        numbers.append(taken[place])
        taken[place] += 1
    return numbers


def raise_if_task_failed(futures: Sequence[Any], workers: Sequence[str], there: Mapping[str, Any]) -> None:
    """Raise UnreachableError if a task has failed for good, after Dask's retries, or if its worker is gone.

    Args:
        workers: address of each task's worker.
        there: descriptions of the living workers, by address.
    """
    for future, worker in zip(futures, workers, strict=True):
        if future.status == "error":
            raise agent.start_error("a Dask worker", future.exception())
        if worker not in there:
            raise UnreachableError(f"Dask worker {worker} is gone; run again when the cluster has a new one")
