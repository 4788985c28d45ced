"""This host's agent of torch Elastic. The agent's workers are agents of ranks. Imports torch."""

import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from flyte_ddp.core.errors import UnreachableError
from flyte_ddp.core.launch.engine import END_SECONDS, JoinTicket, RankInfo, Rendezvous, derive_key, start_agent

TICKET = "flyte-ddp ticket"  # key in Elastic's store
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # torch's variable: Elastic opens no additional store
SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # torch's variable


def publish_ticket(store: Store, rendezvous: Rendezvous, first_rank: int = 0) -> None:
    """Put a ticket, which tells agents how to reach the launcher, into Elastic's store.

    The store is open to the network, so the ticket has no key. ``first_rank`` is Elastic's number of the worker that
    becomes rank 0.
    """
    work, place = rendezvous.work, (rendezvous.hosts, rendezvous.port, rendezvous.visibility_file)
    ticket = *place, str(work.output_folder), work.function, work.world.device_type, first_rank
    store.set(TICKET, json.dumps(ticket))


def find_ticket(store: Store, worker: RankInfo, secret: bytes, *likeliest: str) -> JoinTicket | None:
    """Return the ticket of an agent, or None if the launcher has published none. Does not wait for a ticket.

    Args:
        store: Elastic's store.
        worker: The place of the agent among Elastic's workers.
        secret: The secret of the run, from which the key is derived.
        likeliest: Addresses at which the launcher may be reached, likelier than the ticket's.
    """
    if not store.check([TICKET]):  # store.get alone would block in C++, where Python handles no signal
        return None
    hosts, port, visibility_file, folder, function, device_type, first_rank = json.loads(store.get(TICKET))
    rank = (worker.rank - first_rank) % worker.world_size
    info = RankInfo(rank, worker.world_size, worker.local_rank, function, device_type)
    # If the launcher is not at the likeliest address, no program there can prove the key.
    reachable = tuple(dict.fromkeys((*likeliest, *hosts)))
    return JoinTicket(info, reachable, port, derive_key(secret, visibility_file), Path(folder), visibility_file)


@dataclass(frozen=True, eq=False)
class Round:
    """A round of Elastic's rendezvous, in which the same hosts take part."""

    store: Store
    workers: Sequence[RankInfo]  # of this host

    @property
    def num_ranks(self) -> int:
        return self.workers[0].world_size


class Node(SimpleElasticAgent):
    """Elastic's agent of this host. Starts an agent for each rank of the host.

    The agents start when the launcher has published a ticket in the store of Elastic's round.
    """

    def __init__(
        self, parameters: RendezvousParameters, num_workers: int, *, secret: bytes, retries: int, poll_seconds: float
    ) -> None:
        """Connect to Elastic's store, and wait for the connection as long as ``parameters`` allow.

        Args:
            parameters: The parameters of Elastic's rendezvous.
            num_workers: The number of ranks on this host.
            secret: The secret of the run.
            retries: How often this host's agents start again after a failure.
            poll_seconds: The time between two checks of the agents and of the store.
        """
        spec = WorkerSpec(
            role="rank",
            local_world_size=num_workers,
            rdzv_handler=get_rendezvous_handler(parameters),
            entrypoint=start_agent,
            max_restarts=retries,
            monitor_interval=poll_seconds,
        )
        shutdown_seconds = int(os.environ.get(SHUTDOWN_VARIABLE, "30"))
        super().__init__(spec, exit_barrier_timeout=END_SECONDS, shutdown_timeout=shutdown_seconds)
        self.secret = secret
        self.store_host = parameters.endpoint.rpartition(":")[0]
        self.round: Round | None = None  # None between two rounds
        self.published: Round | None = None  # the round in whose store the launcher has published a ticket
        self.agents: list[subprocess.Popen[bytes]] = []
        self.over = False  # whether the launcher needs no agent any more
        self.ended = threading.Event()
        self.error: BaseException | None = None  # by which Elastic's agent has ended

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Record the round. The agents start later, in ``_monitor_workers``."""
        assert worker_group.store is not None
        places = [RankInfo(each.global_rank, each.world_size, each.local_rank) for each in worker_group.workers]
        self.round = Round(worker_group.store, places)
        return {place.local_rank: place.rank for place in places}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Start this host's agents when the launcher has published the tickets.

        Returns whether the agents run, failed or ended.
        """
        if self.round is not None and not self.agents and not self.over:
            tickets = [find_ticket(self.round.store, worker, self.secret) for worker in self.round.workers]
            self.agents = [start_agent(ticket.to_stdin()) for ticket in tickets if ticket is not None]
        codes = [process.poll() for process in self.agents]
        # Agents end by themselves when the run is over.
        if (self.over and None not in codes) or (codes and not any(code != 0 for code in codes)):
            return RunResult(WorkerState.SUCCEEDED, {worker.global_rank: None for worker in worker_group.workers})
        return RunResult(WorkerState.FAILED if any(codes) else WorkerState.HEALTHY)

    def _stop_workers(self, *_: object) -> None:
        """End this host's agents. SIGTERM makes an agent request a stop, and the launcher then saves a checkpoint.

        Waits up to the shutdown timeout of Elastic for the agents, and then kills the agents that still run.
        """
        self.round = None
        for process in self.agents:
            process.terminate()
        deadline = time.monotonic() + self._shutdown_timeout
        for process in self.agents:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.__exit__(None, None, None)
        self.agents = []

    def _shutdown(self, *_: object, **__: object) -> None:
        self._stop_workers()

    @contextmanager
    def run_in_thread(self) -> Iterator[None]:
        """Run Elastic's agent in a thread during the block. The end of the block waits up to 20 s for its end."""

        def run() -> None:
            try:
                self.run()
            except BaseException as error:
                self.error = error
            finally:
                self.ended.set()

        thread = threading.Thread(target=run, name="elastic", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.over = True
            thread.join(2 * END_SECONDS)

    def find_round(self) -> Round | None:
        """Return Elastic's current round, or None between two rounds.

        Raises:
            UnreachableError: Elastic starts no agent any more.
            RendezvousError: Elastic's rendezvous has failed.
        """
        if self.ended.is_set():
            raise self.error or UnreachableError("Elastic does not start the ranks again")
        return self.round

    def publish_in_new_round(self, rendezvous: Rendezvous) -> None:
        """If Elastic has begun a new round, make ``rendezvous`` accept the round's agents, and publish the ticket.

        Raises the errors of :meth:`find_round`.
        """
        if (found := self.find_round()) is not self.published:
            rendezvous.start_round(found.num_ranks if found else rendezvous.work.world.num_ranks)
            if found:
                publish_ticket(found.store, rendezvous, found.workers[0].rank)
            self.published = found


@contextmanager
def prepare_elastic() -> Iterator[None]:
    """Silence Elastic's logs during the block, and keep Elastic from opening an additional store.

    Sets an environment variable during the block. The logs only repeat the error that the launcher raises. Torch would
    open the additional store to the whole network.
    """
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    levels = {name: logging.getLogger(name).level for name in names}
    before = os.environ.get(OWN_STORE)
    os.environ[OWN_STORE] = "1"
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if before is None:
            del os.environ[OWN_STORE]
