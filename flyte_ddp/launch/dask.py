"""Launches ranks on the workers of a Dask cluster, one to a worker, as processes that the workers start."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import flyte_ddp
from flyte_ddp import hardware as machine
from flyte_ddp.code_digest import ARITHMETIC
from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UnreachableError, UserError, needing
from flyte_ddp.hardware import MOST_CPU_RANKS, Hardware
from flyte_ddp.launch import capacity
from flyte_ddp.launch.remote import agent, sources
from flyte_ddp.launch.remote.rendezvous import JOIN_SECONDS, open_rendezvous
from flyte_ddp.launch.supervise.processes import main_script_hidden
from flyte_ddp.launch.supervise.rank_process import RankInfo
from flyte_ddp.runs.job import Job
from flyte_ddp.settings import from_environment

SCHEDULER = "DASK_SCHEDULER_ADDRESS"  # Dask's own variable
WORKERS = "workers of the Dask cluster"
REACH_SECONDS = 10
TASKS_A_THREAD = 10  # of an adaptive cluster: half a second each, until Dask knows better, for five seconds of work
DEVICES = "CUDA_VISIBLE_DEVICES"
# For a cluster that only ranks use: 50 looks at the clock a second in each process, profiles of tasks, and figures of
# the machine took an eighth of a core with two idle workers (benchmarks/README.md).
UNWATCHED = {
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.system-monitor.interval": "5s",
    "distributed.worker.profile.enabled": False,
}


def launch(job: Job, *, num_ranks: int, client: Any = None, retries: int = 0) -> None:
    """Run the job on ``num_ranks`` workers, on as few hosts as possible, with the sources that are here.

    Args:
        client: of the cluster, Dask's own; None for the one that is there, see :func:`connected`.
        retries: Dask's own: how often it starts a task once more when it has failed. All ranks then resume from the
            newest checkpoint. Each rank stays on its worker, so that a lost worker ends the run.
    """
    with needing("dask"):
        from dask import annotate  # type: ignore[attr-defined]
        from dask.delayed import delayed
        from distributed import wait
        from distributed.utils import get_ip

    with connected(client, num_ranks) as cluster, ExitStack() as until_sent:
        count = until_sent.enter_context(demand_for_workers(cluster, num_ranks))
        capacity.wait_for_hosts(count, num_ranks, WORKERS, job.settings.timeout)
        there = workers_of(cluster)
        workers = choose_workers(there, work_of(cluster), num_ranks)
        refuse_other_versions(cluster, workers)
        devices = number_gpus(workers, ask(cluster, os.getenv, DEVICES, workers=workers))
        files, run = sources.packed(job.hp), by_value(agent.run_with)
        scheduler = cluster.scheduler.address.rpartition("//")[2].rpartition(":")[0]
        with open_rendezvous(job, get_ip(scheduler)) as rendezvous:
            tasks = []
            for rank, worker in enumerate(workers):
                stdin = agent.input_of(rendezvous.ticket(RankInfo(rank, num_ranks, devices[rank])))
                with annotate(workers=[worker], allow_other_workers=False, retries=retries):
                    tasks.append(delayed(run, pure=False)(files, stdin, there[worker]["local_directory"]))
            # All at once, so that of two runs at the same time no worker takes the other's rank first.
            with unreachable_if_gone(cluster):
                futures: list[Any] = cluster.compute(tasks, optimize_graph=False)
            until_sent.close()
            try:
                rendezvous.run(num_ranks, lambda: refuse_failed(futures, workers, workers_of(cluster)))
            finally:
                # Agents end by themselves when the launcher listens no more; those of workers that are gone have ended.
                rendezvous.close()
                with suppress(Exception):  # not in time, or there is no scheduler any more
                    wait(futures, timeout=JOIN_SECONDS)
                with suppress(Exception):  # which is what Dask raises at a client that is closed
                    cluster.cancel(futures, force=True)


def hardware(hp: Hyperparameters, client: Any, *, coming: int = 0, seconds: float | None = None) -> Hardware:
    """Return what ranks find on the workers: a GPU for each if all workers see one, and their share of hosts' cores.

    Args:
        client: of the cluster.
        coming: how many workers the cluster will have at least; waits for as many as there are to be ranks. 0: that is
            not known, so that fewer ranks will do when the time is over.
        seconds: to wait for as many workers as there are to be ranks, or for one if their number is not given; None:
            ``FLYTE_DDP_TIMEOUT``.

    Raises:
        UserError: hyperparameters that the cluster cannot serve.
        UnreachableError: workers that have not come.
    """
    wanted = max(1, hp.num_ranks)
    if coming:
        what = f"the Dask cluster has {coming} workers"
        wanted = capacity.clamp_ranks(hp.num_ranks, coming, what, coming, exact=True)
    with demand_for_workers(client, wanted) as count:
        try:
            capacity.wait_for_hosts(count, wanted, WORKERS, from_environment().timeout if seconds is None else seconds)
        except UnreachableError:
            if coming or not count():
                raise
        workers = workers_of(client)
        refuse_other_versions(client, workers)
        gpus = ask(client, machine.visible_gpus)
        has_gpus = bool(gpus) and all(gpus.values())
        device = capacity.device_type(hp.backend, has_gpus, "not all workers of the Dask cluster have one")
        number = coming or len(workers)
        most, what = (
            number if device == "cuda" else min(number, hp.batch_size),
            f"the Dask cluster has {number} workers",
        )
        num_ranks = capacity.clamp_ranks(hp.num_ranks, number, what, most, exact=coming > 0)
        used = choose_workers(workers, work_of(client), num_ranks)
        cores = ask(client, machine.cores, workers=used)
        bf16 = ask(client, machine.bf16_support, device, workers=used)
    on_host = Counter(workers[worker]["host"] for worker in used)
    threads = min(max(1, cores[worker] // on_host[workers[worker]["host"]]) for worker in used)
    return machine.decide(hp, device, num_ranks, threads=threads, bf16=min(bf16.values()))


@contextmanager
def demand_for_workers(client: Any, wanted: int) -> Iterator[Callable[[], int]]:
    """Have an adaptive cluster start workers, and keep them, until the end of the block.

    It does so for tasks only. So it gets some that no worker can run, and that are cancelled in the end.

    Yields:
        What counts the cluster's workers, and asks for more while they are fewer than wanted.
    """
    tasks: list[Any] = []

    def count() -> int:
        workers = workers_of(client)
        threads = max((worker["nthreads"] for worker in workers.values()), default=1)
        more = range(len(tasks), wanted * threads * TASKS_A_THREAD)
        if more and len(workers) < wanted:
            with unreachable_if_gone(client):
                tasks.extend(client.map(abs, more, pure=False, resources={"of no worker": 1}))
        return len(workers)

    try:
        yield count
    finally:
        with suppress(Exception):  # which is what Dask raises at a client that is closed
            client.cancel(tasks, force=True)


def ask(client: Any, function: Callable[..., Any], *arguments: Any, workers: Sequence[str] | None = None) -> Any:
    """Return what a function, which may be this library's, returns on each of these workers, or on all."""
    with unreachable_if_gone(client):
        return client.run(by_value(function), *arguments, workers=workers)


def by_value(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of this library as workers can call it that have no copy of it, or another one.

    The functions that it calls go along; what it imports while it runs must be there.
    """
    import cloudpickle  # type: ignore[import-untyped]

    cloudpickle.register_pickle_by_value(flyte_ddp)
    try:
        content = cloudpickle.dumps(function)
    finally:
        cloudpickle.unregister_pickle_by_value(flyte_ddp)

    def call(*arguments: Any) -> Any:  # pickled by value by itself, as it is in no module
        import pickle

        return pickle.loads(content)(*arguments)

    call.__name__ = function.__name__  # which Dask shows
    return call


def refuse_other_versions(client: Any, workers: Iterable[str]) -> None:
    """Raise UserError if a worker has another Python, or another release of what decides how it computes."""
    with unreachable_if_gone(client):
        found = client.get_versions(packages=ARITHMETIC)
    here = format_versions(found["client"])
    for worker in workers:
        if worker in found["workers"] and (other := format_versions(found["workers"][worker])) != here:
            raise UserError(f"Dask worker {worker} has {other}, and this process {here}; use one image for all")


def format_versions(found: Mapping[str, Any]) -> str:
    """Return what Dask has found out about a process as ``python 3.12, torch 2.15.0, torchvision 0.29.2``."""
    releases = found["packages"]
    python = ".".join(releases["python"].split(".")[:2])
    return ", ".join([f"python {python}", *(f"{name} {releases[name]}" for name in ARITHMETIC if releases.get(name))])


@contextmanager
def connected(client: Any = None, num_ranks: int = 0, seconds: float | None = None) -> Iterator[Any]:
    """Yield a client: this one, Dask's current one, of ``DASK_SCHEDULER_ADDRESS``, or of a cluster that is made here.

    Args:
        num_ranks: workers of a cluster that is made here; 0: one for each GPU, or for each core up to a few.
        seconds: to wait for a scheduler that may still have to start; None: REACH_SECONDS.

    Raises:
        UserError: Dask is not installed, or the address is none.
        UnreachableError: there is no scheduler.
    """
    with needing("dask"):
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
            workers = num_ranks or machine.visible_gpus() or min(machine.cores(), MOST_CPU_RANKS)
            with main_script_hidden(), config.set(UNWATCHED):
                cluster = LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=":0")
            client = Client(stack.enter_context(cluster))
        yield stack.enter_context(client)


def workers_of(client: Any) -> dict[str, Any]:
    """Return what the scheduler knows of each worker, by address."""
    with unreachable_if_gone(client):
        workers: dict[str, Any] = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    return workers


def work_of(client: Any) -> dict[str, Any]:
    """Return the tasks that each worker runs, by address."""
    with unreachable_if_gone(client):
        work: dict[str, Any] = client.processing()
    return work


@contextmanager
def unreachable_if_gone(client: Any) -> Iterator[None]:
    """Raise UnreachableError in place of what Dask raises if the cluster, or a worker of it, is gone."""
    where = f" of {client.scheduler.address}" if client.scheduler else ""  # None: Dask has given it up
    try:
        yield
    except Exception as error:
        if client.status == "running" and not isinstance(error, OSError):
            raise
        raise UnreachableError(f"the Dask cluster{where} does not answer ({error}); run again when it does") from None


def choose_workers(workers: Mapping[str, Any], busy: Mapping[str, Any], num_ranks: int) -> list[str]:
    """Return the addresses of so many workers: of as few hosts as possible, those of a host side by side.

    Args:
        workers: by address, with their ``host``; UnreachableError if they are fewer.
        busy: the tasks of each worker; workers with tasks are taken only if others do not suffice.
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


def number_gpus(workers: Sequence[str], visible: Mapping[str, str | None]) -> list[int]:
    """Return which of the GPUs that its worker sees each rank takes: the next of those that see the same list.

    Plain workers of a host see the same list; dask-cuda rotates it, so that each worker has another one first.
    """
    taken = Counter[tuple[str, str]]()
    numbers = []
    for worker in workers:
        place = (worker.rpartition(":")[0], visible.get(worker) or "")
        numbers.append(taken[place])
        taken[place] += 1
    return numbers


def refuse_failed(futures: Sequence[Any], workers: Sequence[str], there: Mapping[str, Any]) -> None:
    """Raise UnreachableError if a task has failed, which Dask does not try again, or its worker is gone."""
    for future, worker in zip(futures, workers, strict=True):
        if future.status == "error":
            raise agent.cannot_start("a Dask worker", future.exception())
        if worker not in there:
            raise UnreachableError(f"Dask worker {worker} is gone; run again when the cluster has a new one")
