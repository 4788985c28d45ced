"""Runs ranks on other hosts by agents. An engine such as Ray or Dask starts the agents.

Each agent gets a :class:`JoinTicket` and connects over TCP. The launcher supervises the agent's rank like a local rank.
"""

from __future__ import annotations

import hmac
import queue
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from flyte_ddp.core.errors import RankError, StoppedError, UnreachableError, UserError, print_to_stderr
from flyte_ddp.core.launch.remote.connection import WAIT_SECONDS, JoinTicket, WorkerConnection, accept_agents
from flyte_ddp.core.launch.remote.remote_handle import RemoteHandle
from flyte_ddp.core.launch.supervise.link import RankInfo
from flyte_ddp.core.launch.supervise.messages import RunOver
from flyte_ddp.core.launch.supervise.rank_handle import RankHandle
from flyte_ddp.core.launch.supervise.restarts import Restarts
from flyte_ddp.core.launch.supervise.stopping import StopRequest, catch_stop_signals, stop_error
from flyte_ddp.core.launch.supervise.supervisor import end_ranks, supervise_ranks
from flyte_ddp.core.runs.checkpoint import find_newest_step
from flyte_ddp.core.runs.run_folder import rewind_to_newest_checkpoint
from flyte_ddp.core.runs.work import Work
from flyte_ddp.core.user_code.digest import package_digest

GATHER_SECONDS = 300.0  # for all agents to connect, because images may have to be pulled, and nodes added


class Replacement(Enum):
    """The agents that an engine starts when an agent is lost."""

    EACH = "the lost agent"
    ALL = "all agents, perhaps another number of them"
    NONE = "no agent"


@contextmanager
def open_rendezvous(
    work: Work,
    *hosts: str,
    listen: str | None = None,
    secret: bytes | None = None,
    replacement: Replacement = Replacement.EACH,
) -> Iterator[Rendezvous]:
    """Open a free TCP port for agents during the block, and yield the Rendezvous that gathers agents.

    During the block, the output folder holds a hidden empty file. An agent that finds the file sees the folder.

    Args:
        work: The work of the run.
        hosts: The addresses of this process.
        listen: The address to listen at ("": all addresses, None: the first of ``hosts``).
        secret: The secret from which the run's key is derived (None: random).
        replacement: The agents that the engine starts when an agent is lost.
    """
    # Agents look for this file to find out whether they see the folder. The next run deletes *.tmp after a kill.
    visibility_file = f".shared-{secrets.token_hex(16)}.tmp"
    key = derive_key(secret or secrets.token_bytes(32), visibility_file)
    (work.output_folder / visibility_file).touch()
    try:
        with (
            socket.create_server((hosts[0] if listen is None else listen, 0), backlog=128) as server,
            accept_agents(server, key) as arrived,
        ):
            yield Rendezvous(work, hosts, server.getsockname()[1], visibility_file, key, replacement, arrived)
    finally:
        (work.output_folder / visibility_file).unlink(missing_ok=True)


def derive_key(secret: bytes, visibility_file: str) -> bytes:
    return hmac.digest(secret, visibility_file.encode(), "sha256")


@dataclass
class Rendezvous:
    """Gathers agents and supervises their ranks. Made by :func:`open_rendezvous`."""

    work: Work
    hosts: tuple[str, ...]
    port: int
    visibility_file: str
    key: bytes
    replacement: Replacement
    arrived: queue.SimpleQueue[WorkerConnection]
    living: dict[int, WorkerConnection] = field(default_factory=dict)  # gathered agents, by rank

    def make_ticket(self, info: RankInfo) -> JoinTicket:
        return JoinTicket(info, self.hosts, self.port, self.key, self.work.output_folder, self.visibility_file)

    def run_ranks(self, check_engine: Callable[[], None], stop: StopRequest | None = None) -> None:
        """Gather all agents, send them the work, and return when all ranks have completed.

        Each gathering waits up to 300 s for agents. After a recoverable failure, sets the output folder back to the
        newest checkpoint, and the run resumes. Without a checkpoint, empties metrics.jsonl and removes ``results/``. If
        the ranks may restart in place, living agents start their ranks again, and the engine replaces only lost agents.
        Otherwise all agents end. Then the engine must start new agents, or the failure is raised.

        Raises the errors of all launchers (:mod:`flyte_ddp.core.launch`).

        Args:
            check_engine: Called several times a second while agents are missing. Raises if an agent will not come.
            stop: A request to stop that the caller catches (None: this method catches signals).
        """
        failure: BaseException | None = None
        in_place = False
        restarts = Restarts(self.work.settings.restarts)
        with nullcontext(stop) if stop is not None else catch_stop_signals() as request:
            while True:
                group: list[RemoteHandle] = []
                try:
                    self.gather_agents(group, request, check_engine)
                    if isinstance(failure, RankError) and in_place:
                        self.work = restarts.rewind(self.work, failure, keep=self.visibility_file)
                    elif failure is not None:
                        self.work = rewind_work(self.work, describe_end(failure), self.visibility_file)
                    hosts = tuple(handle.host for handle in group)
                    work = replace(self.work, world=replace(self.work.world, hosts=hosts))
                    send_work_in_turn(group, work, request)
                    supervise_ranks(group, request, work)
                except BaseException as error:
                    self.living = {}
                    run = self.work.output_folder
                    reason = restarts.find_reason_to_end(run, error) if isinstance(error, RankError) else error
                    in_place = reason is None and self.restart_in_place(group)
                    if in_place or self.may_start_again(error, request):
                        failure = reason or error
                        request.forget_ranks()
                        group = [handle for handle in group if handle.rank not in self.living]
                        continue
                    no_retry_came = isinstance(error, UnreachableError) and len(group) < self.work.world.num_ranks
                    failure = failure if failure is not None and no_retry_came else reason or error
                    self.end_agents(group, failure)
                    raise failure from None
                else:
                    self.end_agents(group)
                    return
                finally:
                    end_ranks(group)

    def end_agents(self, group: Sequence[RemoteHandle], error: BaseException | None = None) -> None:
        """Show the agents that the run is over, with this error, and that no retry follows.

        If the launcher must stop, nothing is sent to agents of Elastic, because their hosts wait for a new launcher.
        """
        if not (self.replacement is Replacement.ALL and isinstance(error, StoppedError)):
            for handle in group:
                handle.send(RunOver(error))

    def restart_in_place(self, group: Sequence[RemoteHandle]) -> bool:
        """Have the living agents start their ranks again, unless all agents are needed and an agent is lost.

        Waits up to 10 s for each rank's end. Returns whether ranks start again.
        """
        needs_all = self.replacement is not Replacement.EACH
        if not (needs_all and any(handle.lost for handle in group)):
            for handle in group:
                handle.kill()
            self.living = {handle.rank: handle.worker for handle in group if handle.restart()}
        if needs_all and len(self.living) < len(group):
            self.living = {}
        return bool(self.living) or not needs_all

    def may_start_again(self, error: BaseException, stop: StopRequest) -> bool:
        """Return whether the engine may start all agents again after this error."""
        if isinstance(error, StoppedError):  # of a host that stops its ranks, for the engine to start them elsewhere
            return self.replacement is Replacement.ALL and not stop.by_launcher
        recoverable = isinstance(error, RankError) and error.recoverable
        return recoverable and self.replacement is not Replacement.NONE

    def start_round(self, num_ranks: int) -> None:
        """Close the connections of all agents, to gather ``num_ranks`` agents that the engine has started together."""
        with suppress(queue.Empty):
            while True:
                self.arrived.get_nowait().pipe.close()
        for worker in self.living.values():
            worker.pipe.close()
        self.living.clear()
        self.work = replace(self.work, world=replace(self.work.world, num_ranks=num_ranks))

    def gather_agents(self, group: list[RemoteHandle], stop: StopRequest, check_engine: Callable[[], None]) -> None:
        """Wait for the missing agents, and fill ``group`` with the handles of all connected agents, ordered by rank.

        While waiting, calls ``check_engine``, which raises if an agent will not come.

        Raises:
            UnreachableError: An agent has not connected within 300 s.
            UserError: The flyte_ddp of an agent has other sources.
            StoppedError, KeyboardInterrupt: A stop signal has come.
        """
        deadline = time.monotonic() + GATHER_SECONDS
        group[:] = self.make_handles(self.living)
        while len(self.living) < (num_ranks := self.work.world.num_ranks):
            if stop.signal is not None:
                # A run before a retry may have saved a checkpoint.
                raise stop_error(stop.signal, find_newest_step(self.work.output_folder))
            check_engine()
            if time.monotonic() > deadline:
                missing = sorted(set(range(num_ranks)) - self.living.keys())
                raise UnreachableError(
                    f"ranks {missing} of {num_ranks} did not connect to {' or '.join(self.hosts)} within "
                    f"{GATHER_SECONDS:g} s; let their hosts reach this host, or add capacity to the cluster"
                )
            try:
                worker = self.arrived.get(timeout=WAIT_SECONDS)
            except queue.Empty:
                continue
            if worker.code != package_digest():
                worker.pipe.close()
                raise UserError(
                    f"host {worker.host} runs library sources {worker.code}, but this host runs "
                    f"{package_digest()}; install the same flyte-ddp on all hosts of the cluster"
                )
            if worker.rank in self.living:  # the engine has replaced the agent
                self.living[worker.rank].pipe.close()
            self.living[worker.rank] = worker
            group[:] = self.make_handles(self.living)

    def make_handles(self, found: Mapping[int, WorkerConnection]) -> list[RemoteHandle]:
        """Return the handles of the connected ranks, ordered by rank.

        ``found`` has the connections by rank. All ranks of a host use the folder of the host's lowest rank. Ranks on
        the launcher's host get the launcher's address that other hosts reach.
        """
        workers = [found[rank] for rank in sorted(found)]
        # Agents on the launcher's host may use the loopback. An address that other hosts have reached works for all.
        from_elsewhere = [worker.launcher_address for worker in workers if not worker.is_on_launcher_host]
        here = next(iter((*from_elsewhere, *(worker.host for worker in workers))), "")
        folders: dict[str, Path] = {}
        handles: list[RemoteHandle] = []
        for worker in workers:
            host = here if worker.is_on_launcher_host else worker.host
            files_in = folders.setdefault(host, worker.folder) if worker.folder else self.work.output_folder
            handles.append(RemoteHandle(worker, host, self.work.output_folder, files_in))
        return handles


def send_work_in_turn(group: Sequence[RankHandle], work: Work, stop: StopRequest) -> None:
    """Send each rank the work. If a stop comes meanwhile, raise StoppedError or KeyboardInterrupt."""
    for handle in group:
        handle.send_work(work)
        if stop.signal is not None:
            raise stop_error(stop.signal, handle.resumed_step)


def describe_end(failure: BaseException) -> str:
    """Return a sentence about the end of all agents, for people."""
    if isinstance(failure, StoppedError):
        return "a host has stopped its ranks, or another host has joined"
    return str(failure).splitlines()[0]


def rewind_work(work: Work, why: str, keep: str = "") -> Work:
    """Rewind the output folder to its newest checkpoint or to the start, and return the work from there.

    Prints ``why``, unless progress is off. Removes temporary files of killed ranks, except the file named ``keep``.
    Without a checkpoint, also empties metrics.jsonl and removes ``results/``.

    Raises:
        UserError: No existing checkpoint is readable, or the newest checkpoint is of another run.
    """
    found = rewind_to_newest_checkpoint(work.output_folder, work.identity, keep)
    if work.settings.progress != "off":
        what = f"going on after step {found.step:,}" if found else "restarting from scratch"
        print_to_stderr(f"{why}; {what}")
    return replace(work, checkpoint=found)
