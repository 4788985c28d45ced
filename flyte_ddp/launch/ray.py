"""Launches ranks on a Ray cluster: a task of Ray's for each, which starts the rank as a process of its own."""

import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from flyte_ddp import hardware as machine
from flyte_ddp.config import Hyperparameters
from flyte_ddp.cpu import Bf16
from flyte_ddp.errors import UnreachableError, UserError, needing
from flyte_ddp.hardware import MOST_CPU_RANKS, Hardware
from flyte_ddp.launch import capacity
from flyte_ddp.launch.remote import agent
from flyte_ddp.launch.remote.rendezvous import JOIN_SECONDS, open_rendezvous
from flyte_ddp.launch.supervise.rank_process import RankInfo
from flyte_ddp.process import signal_handlers
from flyte_ddp.runs.job import Job

ADDRESS = "RAY_ADDRESS"  # Ray's own variable
GPUS_SHOWN = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}  # older releases hide them from a task that reserves none
REACH_SECONDS = 10.0  # for a cluster to answer, which Ray itself waits for without end, or for a quarter of an hour
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # HTTP/2's, with empty settings
SETTINGS = 4  # the type of the first frame that an HTTP/2 server sends, at the fourth byte


def launch(job: Job, *, num_ranks: int, max_retries: int = 0) -> None:
    """Run the job as ``num_ranks`` tasks of the cluster, on as few hosts as possible.

    Args:
        max_retries: Ray's own: how often it starts a task once more when it has failed, or its host is gone. All ranks
            then resume from the newest checkpoint.
    """
    with connected():
        import ray
        from ray.util import get_node_ip_address, placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = {"CPU": job.hardware.threads, "GPU": 1 if job.hardware.device_type == "cuda" else 0}
        group = placement_group([{name: need for name, need in needs.items() if need}] * num_ranks, strategy="PACK")
        options = {
            "num_cpus": needs["CPU"],
            "num_gpus": needs["GPU"],
            "max_retries": max_retries,
            "retry_exceptions": [agent.RankEndedError],
        }
        tasks: list[Any] = []
        with open_rendezvous(job, get_node_ip_address()) as rendezvous:
            try:
                for rank in range(num_ranks):
                    where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
                    task = ray.remote(agent.run).options(**options, scheduling_strategy=where)
                    info = RankInfo(rank, num_ranks, local_rank=0)  # Ray shows a task its GPUs only
                    tasks.append(task.remote(rendezvous.ticket(info)))
                rendezvous.run(num_ranks, lambda: refuse_failed(tasks))
            finally:
                # Agents end when the launcher listens no more, with all that their ranks have started, unless Ray kills
                # them meanwhile, as it does by force. Tasks that are left wait for their turn, or for another try.
                rendezvous.close()
                for force in (False, True):
                    for task in tasks:
                        ray.cancel(task, force=force)
                    _, tasks = ray.wait(tasks, num_returns=len(tasks), timeout=JOIN_SECONDS) if tasks else ([], [])
                remove_placement_group(group)


def hardware(hp: Hyperparameters, nodes_to_come: int = 0, seconds: float = 0.0) -> Hardware:
    """Return what ranks find on the cluster: a GPU for each, or CPUs, of which each has as many as all can have.

    Args:
        nodes_to_come: waits for so many nodes that take ranks, and has as many ranks as were asked for. 0: takes the
            cluster as it is.
        seconds: to wait.

    Raises:
        UserError: hyperparameters that the cluster cannot serve.
        UnreachableError: there is no cluster, or a node does not come.
    """
    with connected():
        capacity.wait_for_hosts(lambda: len(nodes_for_ranks()), nodes_to_come, "nodes of the Ray cluster", seconds)
        resources = [node["Resources"] for node in nodes_for_ranks()]
        cpus, gpus = ([int(node.get(kind, 0)) for node in resources] for kind in ("CPU", "GPU"))
        device = capacity.device_type(hp.backend, sum(gpus) > 0, "the Ray cluster has none")
        if device == "cuda":
            total, what = sum(gpus), f"the Ray cluster has {sum(gpus)} GPUs"
            most = total
        else:
            total, what = sum(cpus), f"the Ray cluster has {sum(cpus)} CPUs"
            most = min(sum(min(cpu, MOST_CPU_RANKS) for cpu in cpus), hp.batch_size)
        num_ranks = capacity.clamp_ranks(hp.num_ranks, total, what, most, exact=nodes_to_come > 0)
        if device == "cuda":
            threads = min(max(1, cpu // gpu) for cpu, gpu in zip(cpus, gpus, strict=True) if gpu)
        else:
            threads = cpus_of_each(cpus, num_ranks)
        bf16 = bf16_of_all(device) if hp.precision in ("auto", "bf16") else Bf16.NONE  # else it is of no use
        return machine.decide(hp, device, num_ranks, threads=threads, bf16=bf16)


def nodes_for_ranks() -> list[dict[str, Any]]:
    """Return the nodes that take ranks, as Ray describes them: a head on Kubernetes has no CPU to give."""
    import ray

    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]


def bf16_of_all(device: str) -> Bf16:
    """Return what bf16 is worth on all nodes that may get ranks: the least, as ranks compute alike.

    Each node is asked by a task that runs there, and waited for without a limit. The task reserves nothing, so that a
    node whose CPUs and GPUs are all taken answers like others. It sees all of the node's GPUs, and asks the first.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    gpus, ask = 1 if device == "cuda" else 0, ray.remote(machine.bf16_support)
    options = {"num_cpus": 0, "num_gpus": 0, "runtime_env": {"env_vars": GPUS_SHOWN} if gpus else None}
    nodes = [node["NodeID"] for node in nodes_for_ranks() if node["Resources"].get("GPU", 0) >= gpus]
    places = [NodeAffinitySchedulingStrategy(node, False) for node in nodes]
    return min(ray.get([ask.options(**options, scheduling_strategy=place).remote(device) for place in places]))


def cpus_of_each(cpus: Sequence[int], num_ranks: int) -> int:
    """Return the most CPUs that so many ranks can have each, on hosts with these numbers of them."""
    return next(each for each in range(max(cpus), 0, -1) if sum(cpu // each for cpu in cpus) >= num_ranks)


@contextmanager
def connected() -> Iterator[None]:
    """Connect to Ray for the block, to the cluster of ``RAY_ADDRESS`` or to one that is started on this machine.

    Uses Ray as it is where it has been initialised.

    Raises:
        UserError: Ray is not installed, or refuses this process, or does not start here.
        UnreachableError: there is no cluster.
    """
    with needing("ray"):
        import ray

    if ray.is_initialized():
        yield
        return
    address = os.environ.get(ADDRESS) or None
    what = f"{ADDRESS}={address}" if address else "Ray on this machine"
    try:
        with signal_handlers({signal.SIGTERM: signal.getsignal(signal.SIGTERM)}):  # ray.init sets one of its own
            try:
                check_cluster_answers(address)
                ray.init(address, include_dashboard=None if address else False)
            except UserError:
                raise
            except (OSError, ValueError) as error:
                why = str(error).partition("\n")[0]
                raise UnreachableError(f"{what}: no cluster there ({why}); start one, or correct the address") from None
            except RuntimeError as error:  # such as one of another version; if Ray cannot connect it is an OSError
                raise UserError(f"{what}: Ray refuses: {' '.join(str(error).split())}") from None
        yield
    finally:
        ray.shutdown()


def check_cluster_answers(address: str | None) -> None:
    """Return if a server answers where Ray would connect to, or if Ray would start a cluster on this machine.

    Args:
        address: the value of RAY_ADDRESS, or None.

    Raises:
        UserError: the address is not of the form that ranks need.
        OSError: no server answers there as one of Ray's does, within REACH_SECONDS.
        ValueError: Ray does not understand the address.
    """
    from ray._private.services import canonicalize_bootstrap_address

    if address and "://" in address:
        raise UserError(
            f"{ADDRESS}={address}: ranks connect to this process, which must be on a host of the cluster; give the "
            "cluster's head as host:port, such as 10.0.0.1:6379"
        )
    place = canonicalize_bootstrap_address(address)  # type: ignore[arg-type]  # None is one
    if place is None:
        return
    host, _, port = place.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_SECONDS) as server:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return
            server.sendall(HELLO)
            with server.makefile("rb") as answer:
                if answer.read(SETTINGS)[-1:] != bytes((SETTINGS,)):
                    raise ConnectionError("what listens there is none of Ray's")
    except OSError as error:
        raise ConnectionError(f"{place}: {error}") from None


def refuse_failed(tasks: Sequence[Any]) -> None:
    """Raise UnreachableError if a task has failed, which Ray does not try again."""
    import ray

    ended, _ = ray.wait(list(tasks), num_returns=len(tasks), timeout=0)
    try:
        ray.get(ended)
    except Exception as error:
        raise agent.cannot_start("a host of the Ray cluster", error) from None
