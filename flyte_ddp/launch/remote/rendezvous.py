"""Ranks on other hosts: an agent there starts each, as a process of its own, and is its proxy (agent.py, proxy.py).

An engine such as Ray or Dask starts the agents where it has capacity, and hands each its :class:`JoinTicket`. They
connect to the launcher over TCP, and from then on their ranks are a worker group like any other.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flyte_ddp import results
from flyte_ddp.code_digest import package_digest
from flyte_ddp.errors import RankError, UnreachableError, UserError
from flyte_ddp.launch.remote.file_sync import APPENDED, pieces, take_piece
from flyte_ddp.launch.remote.joining import JoinTicket
from flyte_ddp.launch.remote.listener import AuthenticatedListener, WorkerConnection
from flyte_ddp.launch.supervise.rank_handle import RankHandle
from flyte_ddp.launch.supervise.rank_process import RankInfo
from flyte_ddp.launch.supervise.stopping import StopRequest, stop_requests
from flyte_ddp.launch.supervise.supervisor import end, watch
from flyte_ddp.runs.checkpoint import load_latest, newest_step
from flyte_ddp.runs.job import Job

GATHER_SECONDS = 300.0  # for all agents: images may have to be pulled, and nodes added
JOIN_SECONDS = 10.0  # for a killed rank to end
STACK_SECONDS = 3.0  # more than the agent's own


class RemoteHandle(RankHandle):
    """A rank whose proxy is an agent.

    Args:
        worker: the agent's connection.
        host: the address at which other ranks reach the rank.
        run_folder: the launcher's own.
        files_in: the folder of the rank's host in which the run's files are, the run folder if the host sees that.
    """

    def __init__(self, worker: WorkerConnection, host: str, run_folder: Path, files_in: Path) -> None:
        super().__init__(worker.rank, worker.pipe, host)
        self.worker, self.network, self.run_folder, self.files_in = worker, host, run_folder, files_in
        self.clock_behind = worker.received_at - worker.clock
        self.early: list[dict[str, Any]] = []
        self.out_of_memory = self.results_failed = False

    @property
    def lost(self) -> bool:
        """Whether the agent is gone without having said how its rank ended."""
        return not self.listening and self.exitcode is None

    def ran_out_of_memory(self) -> bool:
        """Return what the agent has found on its host when the rank's process had ended.

        Of a rank that was lost on the launcher's host, as Elastic's are, return what the launcher finds.
        """
        return self.out_of_memory or (self.lost and self.worker.is_here and super().ran_out_of_memory())

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield what the rank has sent since the last call. Takes in the agent's own messages, and writes files."""
        early, self.early = self.early, []
        for message in (*early, *super().messages()):
            if message["kind"] == "exit":
                self.exitcode, self.out_of_memory = message["code"], message.get("out_of_memory", False)
            elif message["kind"] == "file":
                self._take_file(message)
            else:
                yield message

    def _take_file(self, message: dict[str, Any]) -> None:
        try:
            take_piece(self.run_folder, message)
        except (UserError, OSError) as error:
            if not message["name"].startswith(results.FOLDER):
                raise
            if not self.results_failed:  # as where ranks write them
                print(f"{error}; training continues without it", file=sys.stderr, flush=True)
            self.results_failed = True

    def hand_over(self, job: Job) -> None:
        """Send the job, and before it the files that the run needs on a host that does not see the run folder.

        Of the agents of one host only the one in whose folder the files are is sent them. Waits until it has them, so
        that ranks of the same host that are handed the job later find them.
        """
        if self.files_in == self.worker.folder:
            checkpoint, log = job.checkpoint, job.run_folder / APPENDED
            files = [job.initial_weights, checkpoint.path if checkpoint else None, log if self.rank == 0 else None]
            with suppress(OSError, EOFError):  # an agent that is lost is noticed by whoever listens to it
                for path in filter(None, files):
                    self._send_file(path)
        super().hand_over(job)

    def _send_file(self, path: Path) -> None:
        for piece in pieces(path, path.name):
            self.pipe.send(piece)
        while (message := self.pipe.recv())["kind"] != "stored":
            self.early.append(message)

    def localize(self, job: Job) -> Job:
        """Return the job with the paths that its files have on the rank's host."""
        if self.worker.folder is None:
            return job
        found, weights, folder = job.checkpoint, job.initial_weights, self.files_in
        return replace(
            job,
            run_folder=folder,
            checkpoint=replace(found, path=folder / found.path.name) if found else None,
            initial_weights=folder / weights.name if weights else None,
        )

    def stack(self) -> str:
        """See :class:`RankHandle`."""
        self.send("stack")
        for message in self._messages_within(STACK_SECONDS):
            if message["kind"] == "stack":
                return str(message["text"])
            self.early.append(message)
        return ""

    def kill(self) -> None:
        """See :class:`RankHandle`; an agent also kills its rank when its connection to here ends."""
        self.send("kill")

    def close(self) -> None:
        """Take the rank's last files until its agent reports its exit, for up to JOIN_SECONDS; close the connection."""
        if self.exitcode is None:
            for message in self._messages_within(JOIN_SECONDS):
                if message["kind"] == "file":
                    self._take_file(message)
                elif message["kind"] == "exit":
                    break
        self.pipe.close()

    def _messages_within(self, seconds: float) -> Iterator[dict[str, Any]]:
        deadline = time.monotonic() + seconds
        with suppress(EOFError, OSError):
            while self.pipe.poll(max(0.0, deadline - time.monotonic())):
                yield self.pipe.recv()


@contextmanager
def open_rendezvous(
    job: Job, *hosts: str, listen: str | None = None, secret: bytes | None = None, only_once: bool = False
) -> Iterator[Rendezvous]:
    """Listen for agents at a free port, and leave a file in the run folder that shows them whether they see it.

    Args:
        hosts: the addresses at which agents can reach this process.
        listen: the address to listen at: empty for all, None for the first of ``hosts``.
        secret: what the run's key is made from; None: a random one.
        only_once: the engine does not send agents once more after a failure.
    """
    mark = f".shared-{secrets.token_hex(16)}.tmp"  # which the next run removes if this one cannot
    key = derive_key(secret or secrets.token_bytes(32), mark)
    (job.run_folder / mark).touch()
    try:
        with socket.create_server((hosts[0] if listen is None else listen, 0), backlog=128) as server:
            yield Rendezvous(job, server, hosts, mark, key, only_once)
    finally:
        (job.run_folder / mark).unlink(missing_ok=True)


def derive_key(secret: bytes, mark: str) -> bytes:
    """Return the key of one rendezvous, which its random mark tells from others with the same secret."""
    return hmac.digest(secret, mark.encode(), "sha256")


@dataclass
class Rendezvous:
    """Gathers agents and supervises their ranks; see :func:`open_rendezvous`."""

    job: Job
    server: socket.socket
    hosts: tuple[str, ...]
    mark: str
    key: bytes
    only_once: bool

    def ticket(self, info: RankInfo) -> JoinTicket:
        """Return the ticket for the agent of this rank."""
        return JoinTicket(info, self.hosts, self.server.getsockname()[1], self.key, self.job.run_folder, self.mark)

    def close(self) -> None:
        """Close the listening socket; agents that connect later are refused."""
        self.server.close()

    def run(self, num_ranks: int, check: Callable[[], None]) -> None:
        """Wait for all agents, hand them the job, and return when all ranks have completed.

        After a recoverable failure, wait for the engine to start agents again under its own retry policy, and resume
        the run from its newest checkpoint.

        Args:
            check: raises if the engine knows that an agent will not come; called again and again while agents come.
        """
        failure: RankError | None = None
        with stop_requests() as stop:
            while (failure := self.attempt(num_ranks, stop, check, failure)) is not None:
                pass

    def attempt(
        self, num_ranks: int, stop: StopRequest, check: Callable[[], None], before: RankError | None
    ) -> RankError | None:
        """Run the job once; return the failure if another attempt may help, for which it is ``before``."""
        group: list[RankHandle] = []
        try:
            self.gather(group, num_ranks, stop, check)
            if before is not None:
                self.job = from_newest_checkpoint(self.job, str(before).splitlines()[0])
            job = adapt_to_hosts(self.job, {handle.host for handle in group})
            for handle in group:
                handle.hand_over(job)
            watch(group, stop, job)
        except BaseException as error:
            if isinstance(error, RankError) and error.recoverable and not self.only_once:
                return error
            not_sent = isinstance(error, UnreachableError) and len(group) < num_ranks
            final = before if before is not None and not_sent else error
            broadcast_outcome(group, final)
            raise final from None
        else:
            broadcast_outcome(group, None)
            return None
        finally:
            end(group)

    def gather(self, group: list[RankHandle], num_ranks: int, stop: StopRequest, check: Callable[[], None]) -> None:
        """Fill the group with the ranks whose agents have connected, in the order of ranks.

        If two agents claim the same rank, the later one wins: the engine starts a replacement when it has lost the
        first.

        Raises:
            UnreachableError: an agent has not connected within GATHER_SECONDS.
            UserError: an agent runs another version of this library.
        """
        deadline = time.monotonic() + GATHER_SECONDS
        found: dict[int, WorkerConnection] = {}
        with AuthenticatedListener(self.server, self.key) as listener:
            while len(found) < num_ranks:
                if stop.signal is not None:
                    raise stop.error(newest_step(self.job.run_folder))  # an attempt before may have saved one
                check()
                if time.monotonic() > deadline:
                    missing = sorted(set(range(num_ranks)) - found.keys())
                    raise UnreachableError(
                        f"ranks {missing} of {num_ranks} did not connect to {' or '.join(self.hosts)} within "
                        f"{GATHER_SECONDS:g} s: their hosts cannot reach this one, or the cluster has no capacity for "
                        "them; correct that and run again"
                    )
                for worker in listener.new_connections():
                    if worker.code != package_digest():
                        worker.pipe.close()
                        raise UserError(
                            f"host {worker.host} runs library sources {worker.code}, and this one {package_digest()}; "
                            "have the same flyte-ddp on all hosts of the cluster"
                        )
                    if worker.rank in found:
                        found[worker.rank].pipe.close()
                    found[worker.rank] = worker
                    group[:] = self.handles(found)

    def handles(self, found: Mapping[int, WorkerConnection]) -> list[RankHandle]:
        """Return handles of the connected ranks, in order; the lowest rank of each host is the one to get the files."""
        workers = [found[rank] for rank in sorted(found)]
        # Agents on the launcher's host may have come over the loopback; others have reached an address that all can.
        from_elsewhere = [worker.reached_at for worker in workers if not worker.is_here]
        here = (from_elsewhere or [worker.host for worker in workers])[0]
        folders: dict[str, Path] = {}
        handles: list[RankHandle] = []
        for worker in workers:
            host = here if worker.is_here else worker.host
            files_in = folders.setdefault(host, worker.folder) if worker.folder else self.job.run_folder
            handles.append(RemoteHandle(worker, host, self.job.run_folder, files_in))
        return handles


def from_newest_checkpoint(job: Job, why: str) -> Job:
    """Return the job as it resumes from its newest checkpoint; print that with the reason, unless progress is off."""
    found = load_latest(job.run_folder, job.identity)
    if job.settings.progress != "off":
        what = f"going on after step {found.step:,}" if found else "restarting from scratch"
        print(f"{why}; {what}", file=sys.stderr, flush=True)
    return replace(job, checkpoint=found)


def adapt_to_hosts(job: Job, hosts: set[str]) -> Job:
    """Return the job as it is on these hosts: only ranks of a single host can average gradients in shared memory.

    Raises:
        UserError: strategy='shared_memory' was asked for, and there are several hosts.
    """
    job = replace(job, num_nodes=len(hosts))
    if len(hosts) == 1 or job.hardware.strategy != "shared_memory":
        return job
    if job.hp.strategy == "shared_memory":
        raise UserError(
            f"strategy='shared_memory': needs all ranks on one host, and these are on {', '.join(sorted(hosts))}; "
            "use strategy='ddp' or 'auto'"
        )
    return replace(job, hardware=replace(job.hardware, strategy="ddp"))


def broadcast_outcome(group: Sequence[RankHandle], error: BaseException | None) -> None:
    """Tell all agents what became of the run, and that no other attempt will follow."""
    for handle in group:
        handle.send("over", error=error)
