"""Launches ranks on the workers of a Dask cluster, one to a worker, as processes that the workers start."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from flyte_ddp.errors import UnreachableError, UserError
from flyte_ddp.job import Job, Place
from flyte_ddp.launch import agent
from flyte_ddp.launch.remote import JOIN_SECONDS, meeting_place

SCHEDULER = "DASK_SCHEDULER_ADDRESS"  # Dask's own variable
DEVICES = "CUDA_VISIBLE_DEVICES"


def launch(job: Job, *, num_ranks: int, client: Any = None) -> None:
    """Runs the job on ``num_ranks`` workers.

    Args:
        client: of the cluster, Dask's own; None for the one that is there, the scheduler that
            ``DASK_SCHEDULER_ADDRESS`` names, or else a cluster on this machine for the time of the run.

    Raises:
        UserError: the user's mistake, as the rank that failed first reported it, or too few workers.
        UnreachableError: there is no scheduler, or workers cannot reach this host.
        RankError: any other failure of a rank, named by the rank that failed first.
        StoppedError: the process got SIGTERM; for Ctrl-C it is a KeyboardInterrupt.

    """
    from distributed import wait
    from distributed.utils import get_ip

    with connected(client, num_ranks) as cluster:
        workers = chosen(cluster.scheduler_info(n_workers=-1)["workers"], num_ranks)
        devices = numbered(workers, cluster.run(visible_devices, workers=workers))
        scheduler = cluster.scheduler.address.rpartition("//")[2].rpartition(":")[0]
        with meeting_place(job, get_ip(scheduler)) as meeting:
            futures: list[Any] = []
            try:
                for rank, worker in enumerate(workers):
                    place = Place(rank, num_ranks, devices[rank])
                    options = {"workers": [worker], "allow_other_workers": False, "pure": False, "retries": 0}
                    futures.append(cluster.submit(agent.run, meeting.invitation(place), **options))
                meeting.run(num_ranks, lambda: refuse_failed(futures))
            finally:
                # Agents end by themselves when nobody listens any more; those of workers that are gone have ended.
                meeting.close()
                with suppress(TimeoutError):
                    wait(futures, timeout=JOIN_SECONDS)
                cluster.cancel(futures, force=True)


@contextmanager
def connected(client: Any, num_ranks: int) -> Iterator[Any]:
    """A client of the cluster."""
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
            client = Client(address, timeout=10)
        except OSError as error:
            what = f"{SCHEDULER}={address}: no scheduler there ({error})"
            raise UnreachableError(f"{what}; start one, or correct the address") from None
        with client:
            yield client
        return
    with (
        LocalCluster(n_workers=num_ranks, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


def chosen(workers: Mapping[str, Any], num_ranks: int) -> list[str]:
    """The addresses of so many workers: of as few hosts as possible, those of a host side by side.

    Raises:
        UserError: there are fewer.
    """
    hosts: dict[str, list[str]] = defaultdict(list)
    for address, about in workers.items():
        hosts[about["host"]].append(address)
    by_size = sorted(hosts, key=lambda host: (-len(hosts[host]), host))
    ordered = [address for host in by_size for address in sorted(hosts[host])]
    if len(ordered) < num_ranks:
        raise UserError(
            f"num_ranks={num_ranks}: the Dask cluster has {len(ordered)} workers, and each takes one rank; "
            "add workers, or lower num_ranks"
        )
    return ordered[:num_ranks]


def visible_devices() -> str | None:
    """What a worker sees of its host's GPUs."""
    return os.environ.get(DEVICES)


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


def refuse_failed(futures: Sequence[Any]) -> None:
    """Raises what a worker could not do, if there is any."""
    for future in futures:
        if future.status == "error":
            error = future.exception()
            raise UnreachableError(
                f"a Dask worker cannot start a rank ({type(error).__name__}: {error}); it needs flyte-ddp as it is here"
            )
