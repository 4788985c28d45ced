"""Launches ranks on a Ray cluster. One Ray task for each rank starts the rank as a process."""

import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from flyte_ddp.core.checks.parsing import JsonObject
from flyte_ddp.core.errors import UnreachableError, UserError, require_extra
from flyte_ddp.core.launch.engine import (
    END_SECONDS,
    RankEndedError,
    RankInfo,
    agent_start_error,
    open_rendezvous,
    run_agent,
)
from flyte_ddp.core.machine.process import use_signal_handlers
from flyte_ddp.core.machine.resources import MOST_CPU_RANKS, Request, World, choose_device_type
from flyte_ddp.core.runs.work import Work
from flyte_ddp.engines import capacity

ADDRESS = "RAY_ADDRESS"  # Ray's variable
REACH_SECONDS = 10.0  # for a cluster to answer; Ray's limit is a quarter of an hour, or none


def launch(work: Work, *, retries: int = 0, awaited_hosts: int = 0) -> None:
    """Run the work as one Ray task for each rank, and wait for the end of all tasks.

    Uses as few hosts as possible. First waits up to ``work.settings.timeout`` seconds for ``awaited_hosts`` nodes. Ray
    restarts failed tasks up to ``retries`` times. At the end, waits up to 20 s for the cancellation of the remaining
    tasks. Raises the errors of all launchers (:mod:`flyte_ddp.core.launch`).
    """
    with connected():
        import ray
        from ray.util import get_node_ip_address, placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        work = work.choose_world(lambda request: plan_world(request, awaited_hosts, work.settings.timeout))
        num_ranks = work.world.num_ranks
        needs = {"CPU": work.world.threads, "GPU": 1 if work.world.device_type == "cuda" else 0}
        group = placement_group([{name: need for name, need in needs.items() if need}] * num_ranks, strategy="PACK")
        options = {
            "num_cpus": needs["CPU"],
            "num_gpus": needs["GPU"],
            "max_retries": retries,
            "retry_exceptions": [RankEndedError],
        }
        tasks: list[Any] = []
        try:
            with open_rendezvous(work, get_node_ip_address()) as rendezvous:
                for rank in range(num_ranks):
                    where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
                    task = ray.remote(run_agent).options(**options, scheduling_strategy=where)
                    info = RankInfo(
                        rank, num_ranks, 0, work.function, work.world.device_type
                    )  # Ray shows a task only the task's GPUs
                    tasks.append(task.remote(rendezvous.make_ticket(info).to_stdin()))
                rendezvous.run_ranks(lambda: raise_if_task_failed(tasks))
        finally:
            # Agents without a launcher kill the processes of their ranks, and end. Force would kill the agents first,
            # so it comes only after that. Remaining tasks have not started, or wait for a retry.
            with suppress(Exception):  # a cluster that is gone must not hide the run's error
                for force in (False, True):
                    for task in tasks:
                        ray.cancel(task, force=force)
                    _, tasks = ray.wait(tasks, num_returns=len(tasks), timeout=END_SECONDS) if tasks else ([], [])
                remove_placement_group(group)


def raise_if_task_failed(tasks: Sequence[Any]) -> None:
    """Raise UnreachableError if one of the Ray tasks has failed. Does not wait."""
    import ray

    ended, _ = ray.wait(list(tasks), num_returns=len(tasks), timeout=0)
    try:
        ray.get(ended)
    except Exception as error:
        raise agent_start_error("a host of the Ray cluster", error) from None


def plan_world(request: Request, awaited_hosts: int = 0, seconds: float = 0.0) -> World:
    """Return the World for ranks on the Ray cluster: number of ranks, device and threads.

    Call this function in a block of :func:`connected`. Each rank gets one GPU, or each rank gets the same number of
    CPUs. Waits up to ``seconds`` for ``awaited_hosts`` nodes with CPUs, and prints each change of their number. If the
    cluster has room for fewer ranks than requested, prints how many ranks start.

    Raises:
        UnreachableError: The nodes have not joined within ``seconds``.
        UserError: The cluster has room for no rank, or ``backend`` is nccl and the cluster has no GPU.
        UserError: The cluster has room for fewer ranks, and the request is exact or ``awaited_hosts`` is given.
    """
    capacity.wait_for_hosts(lambda: len(list_rank_nodes()), awaited_hosts, "nodes of the Ray cluster", seconds)
    resources = [node["Resources"] for node in list_rank_nodes()]
    cpus, gpus = ([int(node.get(kind, 0)) for node in resources] for kind in ("CPU", "GPU"))
    device = choose_device_type(request.backend, sum(gpus) > 0, "the Ray cluster has no GPU")
    wanted, exact = request.num_ranks, request.exact or awaited_hosts > 0
    if device == "cuda":
        total = sum(gpus)
        threads = min(max(1, cpu // gpu) for cpu, gpu in zip(cpus, gpus, strict=True) if gpu)
        num_ranks = capacity.clamp_ranks(wanted, total, f"the Ray cluster has {total} GPUs", total, exact=exact)
        return World(num_ranks, device, threads)
    total, most = sum(cpus), min(sum(min(cpu, MOST_CPU_RANKS) for cpu in cpus), request.most)
    num_ranks = capacity.clamp_ranks(wanted, total, f"the Ray cluster has {total} CPUs", most, exact=exact)
    return World(num_ranks, device, compute_cpus_per_rank(cpus, num_ranks))


def list_rank_nodes() -> list[JsonObject]:
    """Return Ray's descriptions of the living nodes with at least one CPU.

    A head node on Kubernetes has no CPU.
    """
    import ray

    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]


def compute_cpus_per_rank(cpus: Sequence[int], num_ranks: int) -> int:
    """Return the largest number of CPUs that each of ``num_ranks`` ranks can have.

    ``cpus`` has each host's number of CPUs, in all at least ``num_ranks``.
    """
    return next(each for each in range(max(cpus), 0, -1) if sum(cpu // each for cpu in cpus) >= num_ranks)


@contextmanager
def connected() -> Iterator[None]:
    """Connect to Ray for the block, unless this process is already connected.

    Connects to ``RAY_ADDRESS``, else to this machine's cluster. If neither exists, starts a cluster for the block. The
    process keeps its handler of SIGTERM.

    Raises:
        UnreachableError: No cluster answers.
        UserError: Ray is not installed, or ``RAY_ADDRESS`` is a URL.
    """
    with require_extra("ray"):
        import ray

    if ray.is_initialized():
        yield
        return
    address = os.environ.get(ADDRESS) or None
    if address and "://" in address:
        raise UserError(
            f"{ADDRESS}={address}: must be host:port of the cluster's head, such as 10.0.0.1:6379; run this process on "
            "a host of the cluster, because ranks connect to this process"
        )
    what = f"{ADDRESS}={address}" if address else "Ray on this machine"
    try:
        with use_signal_handlers({signal.SIGTERM: signal.getsignal(signal.SIGTERM)}):  # ray.init replaces the handler
            try:
                refuse_unanswered_address(address)
                ray.init(address, include_dashboard=None if address else False)
            except (OSError, ValueError) as error:
                why = str(error).partition("\n")[0]
                raise UnreachableError(f"{what}: no cluster answers ({why}); start one, or fix the address") from None
        yield
    finally:
        ray.shutdown()


def refuse_unanswered_address(address: str | None) -> None:
    """Raise OSError if a cluster's head accepts no connection within 10 s.

    If ``address`` is None, looks for the address of this machine's cluster. If no address is found, does nothing.
    """
    from ray._private.services import canonicalize_bootstrap_address

    place = canonicalize_bootstrap_address(address)  # type: ignore[arg-type]  # None: this machine's cluster
    if place is None:  # Ray would start a cluster on this machine
        return
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"{place}: {error}") from None
