"""Launches ranks on the workers of a Dask cluster, one to a worker, as processes that the workers start."""

from __future__ import annotations

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
from flyte_ddp.launch.supervise.rank_info import RankInfo
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
    """Runs the job on ``num_ranks`` workers, on as few hosts as possible, with the sources that are here.

    Args:
        client: of the cluster, Dask's own; None for the one that is there, see :func:`connected`.
        retries: Dask's own: how often it starts a task once more when it has failed. All ranks then go on from the
            newest checkpoint. Each rank stays on its worker, so that a lost worker ends the run.
    """
    with needing("dask"):
        from dask import annotate  # type: ignore[attr-defined]
        from dask.delayed import delayed
        from distributed import wait
        from distributed.utils import get_ip

    with connected(client, num_ranks) as cluster, ExitStack() as until_sent:
        count = until_sent.enter_context(demand_for_workers(cluster, num_ranks))
        capacity.awaited(count, num_ranks, WORKERS, job.settings.timeout)
        there = workers_of(cluster)
        workers = chosen(there, work_of(cluster), num_ranks)
        refuse_other_versions(cluster, workers)
        devices = numbered(workers, ask(cluster, os.getenv, DEVICES, workers=workers))
        files, run = sources.packed(job.hp), by_value(agent.run_with)
        scheduler = cluster.scheduler.address.rpartition("//")[2].rpartition(":")[0]
        with open_rendezvous(job, get_ip(scheduler)) as rendezvous:
            tasks = []
            for rank, worker in enumerate(workers):
                words = agent.in_words(rendezvous.ticket(RankInfo(rank, num_ranks, devices[rank])))
                with annotate(workers=[worker], allow_other_workers=False, retries=retries):
                    tasks.append(delayed(run, pure=False)(files, words, there[worker]["local_directory"]))
            # All at once, so that of two runs at the same time no worker takes the other's rank first.
            with answering(cluster):
                futures: list[Any] = cluster.compute(tasks, optimize_graph=False)
            until_sent.close()
            try:
                rendezvous.run(num_ranks, lambda: refuse_failed(futures, workers, workers_of(cluster)))
            finally:
                # Agents end by themselves when nobody listens any more; those of workers that are gone have ended.
                rendezvous.close()
                with suppress(Exception):  # not in time, or there is no scheduler any more
                    wait(futures, timeout=JOIN_SECONDS)
                with suppress(Exception):  # which is what Dask raises at a client that is closed
                    cluster.cancel(futures, force=True)


def hardware(hp: Hyperparameters, client: Any, *, coming: int = 0, seconds: float | None = None) -> Hardware:
    """What ranks find on the workers: a GPU for each where all workers see one, and their share of their hosts' cores.

    Args:
        client: of the cluster.
        coming: how many workers it will have at least, of which as many must come as there are to be ranks; 0: nobody
            knows, so that fewer ranks will do when the time is over.
        seconds: to wait for as many workers as there are to be ranks, or for one if their number is not given; None:
            ``FLYTE_DDP_TIMEOUT``.

    Raises:
        UserError: hyperparameters that the cluster cannot serve.
        UnreachableError: workers that have not come.
    """
    wanted = max(1, hp.num_ranks)
    if coming:
        wanted = capacity.clamp_ranks(hp, coming, f"the Dask cluster has {coming} workers", coming, exact=True)
    with demand_for_workers(client, wanted) as there:
        try:
            capacity.awaited(there, wanted, WORKERS, from_environment().timeout if seconds is None else seconds)
        except UnreachableError:
            if coming or not there():
                raise
        return found_on_workers(hp, client, coming)


def found_on_workers(hp: Hyperparameters, client: Any, coming: int) -> Hardware:
    """Return what ranks find on the workers that the cluster has; see :func:`hardware`."""
    workers = workers_of(client)
    refuse_other_versions(client, workers)
    gpus = ask(client, machine.visible_gpus)
    device = capacity.device_type(hp, bool(gpus) and all(gpus.values()), "not all workers of the Dask cluster have one")
    number = coming or len(workers)
    most = number if device == "cuda" else min(number, hp.batch_size)
    num_ranks = capacity.clamp_ranks(hp, number, f"the Dask cluster has {number} workers", most, exact=coming > 0)
    used = chosen(workers, work_of(client), num_ranks)
    cores = ask(client, machine.cores, workers=used)
    bf16 = ask(client, machine.bf16_support, device, workers=used)
    on_host = Counter(workers[worker]["host"] for worker in used)
    threads = min(max(1, cores[worker] // on_host[workers[worker]["host"]]) for worker in used)
    return machine.decide(hp, device, num_ranks, threads=threads, bf16=min(bf16.values()))


@contextmanager
def demand_for_workers(client: Any, wanted: int) -> Iterator[Callable[[], int]]:
    """Have an adaptive cluster start workers, and keep them, until the end of the block.

    It does so for tasks only. So it gets some that no worker can run, and that are cancelled in the end.

    Returns:
        What counts the cluster's workers, and asks for more where they are fewer than wanted.
    """
    tasks: list[Any] = []

    def there() -> int:
        workers = workers_of(client)
        threads = max((worker["nthreads"] for worker in workers.values()), default=1)
        more = range(len(tasks), wanted * threads * TASKS_A_THREAD)
        if more and len(workers) < wanted:
            with answering(client):
                tasks.extend(client.map(abs, more, pure=False, resources={"of no worker": 1}))
        return len(workers)

    try:
        yield there
    finally:
        with suppress(Exception):  # which is what Dask raises at a client that is closed
            client.cancel(tasks, force=True)


def ask(client: Any, function: Callable[..., Any], *arguments: Any, workers: Sequence[str] | None = None) -> Any:
    """What a function, which may be this library's, returns on each of these workers, or on all."""
    with answering(client):
        return client.run(by_value(function), *arguments, workers=workers)


def by_value(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of this library as workers can call it that have no copy of it, or another one.

    What it is made of goes along; what it imports while it runs must be there.
    """
    import cloudpickle  # type: ignore[import-untyped]

    cloudpickle.register_pickle_by_value(flyte_ddp)
    try:
        content = cloudpickle.dumps(function)
    finally:
        cloudpickle.unregister_pickle_by_value(flyte_ddp)

    def call(*arguments: Any) -> Any:  # which goes by value by itself, as no module has it
        import pickle

        return pickle.loads(content)(*arguments)

    call.__name__ = function.__name__  # which Dask shows
    return call


def refuse_other_versions(client: Any, workers: Iterable[str]) -> None:
    """Raises UserError if a worker has another Python, or another release of what decides how it computes."""
    with answering(client):
        found = client.get_versions(packages=ARITHMETIC)
    here = versions(found["client"])
    for worker in workers:
        if worker in found["workers"] and (other := versions(found["workers"][worker])) != here:
            raise UserError(f"Dask worker {worker} has {other}, and this process {here}; use one image for all")


def versions(found: Mapping[str, Any]) -> str:
    """Of what Dask has found out about a process, such as ``python 3.12, torch 2.15.0, torchvision 0.29.2``."""
    releases = found["packages"]
    python = ".".join(releases["python"].split(".")[:2])
    return ", ".join([f"python {python}", *(f"{name} {releases[name]}" for name in ARITHMETIC if releases.get(name))])


@contextmanager
def connected(client: Any = None, num_ranks: int = 0, seconds: float | None = None) -> Iterator[Any]:
    """A client: this one, Dask's current one, of ``DASK_SCHEDULER_ADDRESS``, or of a cluster that is made here.

    Args:
        num_ranks: workers of a cluster that is made here; 0: one for each GPU, or for each core up to a few.
        seconds: to wait for a scheduler that may still have to start; None: a few.

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
    address = os.environ.get(SCHEDULER)
    if address:
        try:
            client = Client(address, timeout=seconds or REACH_SECONDS)
        except ValueError as error:
            raise UserError(f"{SCHEDULER}={address}: {error}; give it as tcp://host:port") from None
        except OSError as error:
            what = f"{SCHEDULER}={address}: no scheduler there ({error})"
            raise UnreachableError(f"{what}; start one, or correct the address") from None
        with client:
            yield client
        return
    num_workers = num_ranks or machine.visible_gpus() or min(machine.cores(), MOST_CPU_RANKS)
    with main_script_hidden(), config.set(UNWATCHED):
        cluster = LocalCluster(n_workers=num_workers, threads_per_worker=1, dashboard_address=":0")
    with cluster, Client(cluster) as client:
        yield client


def workers_of(client: Any) -> dict[str, Any]:
    """What the scheduler knows of each worker, by address."""
    with answering(client):
        workers: dict[str, Any] = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    return workers


def work_of(client: Any) -> dict[str, Any]:
    """What each worker works at, by address."""
    with answering(client):
        work: dict[str, Any] = client.processing()
    return work


@contextmanager
def answering(client: Any) -> Iterator[None]:
    """Goes around what is asked of a cluster: raises UnreachableError where that is gone, or a worker of it."""
    where = f" of {client.scheduler.address}" if client.scheduler else ""  # None: Dask has given it up
    try:
        yield
    except Exception as error:
        if client.status == "running" and not isinstance(error, OSError):
            raise
        raise UnreachableError(f"the Dask cluster{where} does not answer ({error}); run again when it does") from None


def chosen(workers: Mapping[str, Any], busy: Mapping[str, Any], num_ranks: int) -> list[str]:
    """The addresses of so many workers: of as few hosts as possible, those of a host side by side.

    Args:
        workers: by address, with their ``host``; UnreachableError if they are fewer.
        busy: what each of them works at; workers that are at something are taken only if others do not suffice.
    """
    idle = [address for address in workers if not busy.get(address)]
    hosts: dict[str, list[str]] = defaultdict(list)
    for address in idle if len(idle) >= num_ranks else workers:
        hosts[workers[address]["host"]].append(address)
    by_size = sorted(hosts, key=lambda host: (-len(hosts[host]), host))
    ordered = [address for host in by_size for address in sorted(hosts[host])]
    if len(ordered) < num_ranks:
        raise UnreachableError(
            f"num_ranks={num_ranks}: the Dask cluster has {len(ordered)} workers, and each takes one rank; "
            "add workers, or lower num_ranks"
        )
    return ordered[:num_ranks]


def numbered(workers: Sequence[str], visible: Mapping[str, str | None]) -> list[int]:
    """The GPU that each worker's rank takes: the first that it sees, unless that is another's of the same host, too.

    dask-cuda rotates the list that workers see, so that each has another one first; plain workers see the same list.
    """
    taken: dict[str, set[str]] = defaultdict(set)
    count: dict[str, int] = defaultdict(int)
    numbers = []
    for worker in workers:
        host, seen = worker.rpartition(":")[0], (visible.get(worker) or "").split(",")
        number = 0 if seen[0] and seen[0] not in taken[host] else count[host]
        taken[host].add(seen[number] if number < len(seen) else "")
        count[host] += 1
        numbers.append(number)
    return numbers


def refuse_failed(futures: Sequence[Any], workers: Sequence[str], there: Mapping[str, Any]) -> None:
    """Raises what a worker could not do, if there is any, or that it is gone."""
    for future, worker in zip(futures, workers, strict=True):
        if future.status == "error":
            error = future.exception()
            raise UnreachableError(
                f"a Dask worker cannot start a rank ({type(error).__name__}: {error}); it needs flyte-ddp as it is here"
            )
        if worker not in there:
            raise UnreachableError(f"Dask worker {worker} is gone; run again when the cluster has a new one")
