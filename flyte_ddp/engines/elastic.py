"""Launches ranks by torch Elastic, on this machine, on the pods of a job, or under ``torchrun``.

Each of Elastic's workers is the agent of a rank. On this machine and in pods the agents are started by Elastic's agent
in this process (engines/elastic_node.py). Under ``torchrun``, the worker with rank 0 is the launcher.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp.core.errors import RankError, UnreachableError, print_to_stderr
from flyte_ddp.core.launch.engine import (
    LOOPBACK,
    LauncherGoneError,
    RankInfo,
    Rendezvous,
    Replacement,
    connect_to_launcher,
    host_addresses,
    open_local_folder,
    open_rank_restarter,
    open_rendezvous,
    proxy_rank,
    start_agent,
)
from flyte_ddp.core.launch.supervise.stopping import StopRequest, catch_stop_signals, stop_error
from flyte_ddp.core.machine import process, resources
from flyte_ddp.core.machine.resources import Request, World
from flyte_ddp.core.runs.checkpoint import find_newest_step
from flyte_ddp.core.runs.work import Work

if TYPE_CHECKING:
    from flyte_ddp.engines.elastic_node import Node, Round

RUN_ID = "TORCHELASTIC_RUN_ID"  # environment variable of the processes that Elastic starts
KEY_VARIABLE = "FLYTE_DDP_ELASTIC_KEY"
STORE_SECONDS = 60.0  # for Elastic's store to accept a connection
RANK_0_SECONDS = 3600.0  # for rank 0 to accept other ranks, because rank 0 may have to fetch the data first
POLL_SECONDS = 0.1
NEVER_SECONDS = 1_000_000
OVER = "flyte-ddp over"  # key in Elastic's store


def plan_world(request: Request, num_ranks: int, on_this_host: int) -> World:
    """Return the World for a rank in each of Elastic's workers: number of ranks, device and threads.

    Elastic has started ``num_ranks`` workers, ``on_this_host`` of them on this host. If the request has another number
    of ranks, prints that Elastic's number counts.

    Raises:
        UserError: ``backend`` is nccl, and this host has fewer GPUs than workers.
    """
    if request.num_ranks not in (0, num_ranks):
        what = f"num_ranks={request.num_ranks}: Elastic has started {num_ranks} workers"
        print_to_stderr(f"{what}; running {num_ranks} ranks")
    gpus = resources.count_gpus()  # assumes that all hosts have equally many
    lack = f"this host has {gpus} GPU(s) for {on_this_host} Elastic workers"
    device = resources.choose_device_type(request.backend, gpus >= on_this_host, lack)
    return World(num_ranks, device, max(1, resources.count_cores() // on_this_host))


def launch(work: Work, *, retries: int = 0, node: Node | None = None) -> None:
    """Run the work on agents that Elastic starts, and supervise the ranks in this process.

    By default the agents are on this machine. If Elastic has started this process, supervises the ranks of all of
    Elastic's workers. Ranks start again in place. If an agent is lost, Elastic starts all agents of a host again up to
    ``retries`` times. At the end waits up to 20 s for Elastic. Raises the errors of all launchers
    (:mod:`flyte_ddp.core.launch`).

    Args:
        work: The work of the run.
        retries: How often Elastic starts lost agents again on this machine.
        node: This host's agent of Elastic in a job with several hosts, which runs in a thread.
    """
    if RUN_ID in os.environ:
        supervise_torchrun_workers(work)
        return
    with catch_stop_signals() as stop, ExitStack() as at_end:
        if node is not None:
            first = wait_for_first_round(node, work, stop)
            work = work.choose_world(lambda request: plan_world(request, first.num_ranks, len(first.workers)))
            hosts = (node.store_host, *host_addresses())
        else:
            work = work.choose_world(resources.detect_world)
            node, hosts = at_end.enter_context(open_local_node(work.world.num_ranks, retries)), (LOOPBACK,)
        with open_worker_rendezvous(work, hosts, node.secret, Replacement.ALL) as rendezvous:
            rendezvous.run_ranks(lambda: node.publish_in_new_round(rendezvous), stop)


def open_worker_rendezvous(
    work: Work, hosts: tuple[str, ...], secret: bytes, replacement: Replacement
) -> AbstractContextManager[Rendezvous]:
    """Open a rendezvous at all addresses of this host, or only at the loopback if ``hosts`` is (LOOPBACK,)."""
    listen = LOOPBACK if hosts == (LOOPBACK,) else ""
    return open_rendezvous(work, *hosts, listen=listen, secret=secret, replacement=replacement)


def wait_for_first_round(node: Node, work: Work, stop: StopRequest) -> Round:
    """Wait until Elastic has gathered all required hosts, and return the round of Elastic's rendezvous.

    Raises:
        RendezvousTimeoutError: Too few hosts have come.
        StoppedError, KeyboardInterrupt: A stop signal has come.
    """
    while (found := node.find_round()) is None:
        if stop.signal is not None:
            raise stop_error(stop.signal, find_newest_step(work.output_folder))
        time.sleep(POLL_SECONDS)
    return found


@contextmanager
def open_local_node(num_workers: int, retries: int) -> Iterator[Node]:
    """Run Elastic's agent for this machine's ranks in a thread during the block. Only this user can join."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from flyte_ddp.engines.elastic_node import Node, prepare_elastic

    with prepare_elastic(), tempfile.TemporaryDirectory(prefix="flyte-ddp-elastic-") as folder:
        # Elastic's TCP stores have no password. No other host needs a keep-alive.
        place = "c10d", f"{folder}/store", secrets.token_hex(8), 1, 1, LOOPBACK
        parameters = RendezvousParameters(*place, store_type="file", keep_alive_interval=NEVER_SECONDS)
        node = Node(parameters, num_workers, secret=secrets.token_bytes(32), retries=retries, poll_seconds=POLL_SECONDS)
        with node.run_in_thread():
            yield node


def is_leader() -> bool:
    return os.environ["RANK"] == "0"


def supervise_torchrun_workers(work: Work) -> None:
    """Start a rank in each of Elastic's workers, and supervise all ranks in this process, the worker with rank 0.

    Waits until the ranks have ended. Raises the errors of all launchers (:mod:`flyte_ddp.core.launch`).
    """
    from flyte_ddp.engines.elastic_node import find_ticket, publish_ticket

    worker, on_this_host = read_worker_place(), int(os.environ["LOCAL_WORLD_SIZE"])
    work = work.choose_world(lambda request: plan_world(request, worker.world_size, on_this_host))
    hosts = (LOOPBACK,) if worker.world_size == on_this_host else host_addresses()
    store = connect_to_store(work.settings.timeout)
    with (
        ExitStack() as at_end,
        open_worker_rendezvous(work, hosts, read_shared_secret(), Replacement.NONE) as rendezvous,
    ):
        publish_ticket(store, rendezvous)
        ticket = find_ticket(store, worker, read_shared_secret(), LOOPBACK)
        assert ticket is not None
        at_end.enter_context(start_agent(ticket.to_stdin()))
        rendezvous.run_ranks(lambda: None)


@contextmanager
def detect_lost_store() -> Iterator[None]:
    """Raise RankError if Elastic's store is lost during the block."""
    from torch.distributed import DistError

    try:
        yield
    except DistError as lost:
        what = f"lost the connection to Elastic's store ({type(lost).__name__}); see the log of rank 0's host"
        raise RankError(what, recoverable=True) from None


@detect_lost_store()
def follow() -> None:
    """Run this Elastic worker's rank of the run that rank 0's worker launches.

    Waits up to an hour for the launcher, and then without a limit until the run is over. Returns earlier if rank 0's
    worker calls :func:`release_followers`. If the run has failed, raises the run's error. At the end kills the
    processes that were started during the call.

    Raises:
        UnreachableError: Rank 0's worker cannot be reached within an hour.
        RankError: Rank 0's worker or Elastic's store is lost.
    """
    from flyte_ddp.engines.elastic_node import find_ticket

    # By default, Elastic's agent has the store. Otherwise rank 0 makes the store.
    agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store, place = connect_to_store(STORE_SECONDS if agent_has_store else RANK_0_SECONDS), read_worker_place()
    deadline = time.monotonic() + RANK_0_SECONDS
    while time.monotonic() < deadline:
        if store.check([OVER]):
            return
        # All workers reach MASTER_ADDR, where the store is.
        if (ticket := find_ticket(store, place, read_shared_secret(), os.environ["MASTER_ADDR"])) is not None:
            with open_local_folder(ticket) as folder:
                try:
                    pipe = connect_to_launcher(ticket, folder)
                except (OSError, EOFError, AuthenticationError):
                    pass  # an old ticket stays in the store after a restart, until rank 0 sets a new ticket
                else:
                    serve_as_agent(ticket.info, pipe, folder)
                    return
        time.sleep(POLL_SECONDS)
    raise UnreachableError(
        f"rank {place.rank} could not connect to rank 0 within {RANK_0_SECONDS:g} s; rank 0's host must be reachable "
        f"from this host on any port, and {KEY_VARIABLE}, if set, must be the same on both hosts"
    )


def release_followers() -> None:
    """Let the other workers of Elastic return from :func:`follow`, even if this worker has launched no run.

    Does nothing if Elastic's store is lost, because then the other workers return anyway.
    """
    from torch.distributed import DistError

    with suppress(DistError):
        connect_to_store(STORE_SECONDS).set(OVER, "")


def serve_as_agent(info: RankInfo, pipe: Connection, folder: Path) -> None:
    """Start a rank, and connect rank and launcher until the run is over. If the run has failed, raise the run's error.

    Raises:
        RankError: Rank 0's worker is lost.
    """
    # The rank server must not wait for a rank whose descendants live.
    with open_rank_restarter(info) as start_rank, process.kill_new_descendants_at_end():
        try:
            outcome = proxy_rank(start_rank(), pipe, folder, start_rank)
        except LauncherGoneError:
            what = "lost the connection to rank 0; see the log of rank 0's host for the cause"
            raise RankError(what, recoverable=True) from None
    if outcome is not None:
        raise outcome


def connect_to_store(seconds: float) -> Any:
    """Return a client of Elastic's store, and wait up to ``seconds`` for the store."""
    from torch.distributed import rendezvous as connect  # type: ignore[attr-defined]

    return next(iter(connect("env://", timeout=timedelta(seconds=seconds))))[0]


def read_worker_place() -> RankInfo:
    return RankInfo(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))


def read_shared_secret() -> bytes:
    return (os.environ.get(KEY_VARIABLE) or os.environ[RUN_ID]).encode()  # Elastic's open store shows the run id, too
