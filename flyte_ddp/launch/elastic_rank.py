"""What each worker of torch Elastic does: it is a rank, and the worker that is rank 0 also supervises all ranks.

Elastic only reports that some worker on each host has exited, and a follow-up failure can be recorded before the root
cause. So a thread of rank 0 supervises the ranks as other launchers do. It sends its finding to all ranks, and each
raises that, so that every host reports the same error.
"""

import json
import os
import pickle
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flyte_ddp.errors import RankError, StoppedError, UnreachableError, UserError
from flyte_ddp.launch.remote.file_sync import Mirror
from flyte_ddp.launch.remote.host_data import find_prepared_data
from flyte_ddp.launch.remote.joining import JoinTicket, RunOverError, connect, local_run_folder, receive_job
from flyte_ddp.launch.remote.rendezvous import Rendezvous, derive_key, open_rendezvous
from flyte_ddp.launch.supervise.failures import OWN
from flyte_ddp.launch.supervise.link import Link, classify_error
from flyte_ddp.launch.supervise.network import own_addresses, use_network
from flyte_ddp.launch.supervise.rank_process import RankInfo
from flyte_ddp.launch.supervise.stopping import SIGNALS, call_on_signals
from flyte_ddp.process import descendants_killed_at_end, kill_descendants, set_name
from flyte_ddp.runs.job import Job

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
ERROR_SUFFIX = ".pickle"  # of what is left beside it
TICKET = "flyte-ddp ticket"
RUN_ID = "TORCHELASTIC_RUN_ID"  # set in the processes that Elastic starts
KEY_VARIABLE = "FLYTE_DDP_ELASTIC_KEY"
LOOPBACK = "127.0.0.1"
OUTCOME_SECONDS = 45.0  # to hear what became of the run: more than it takes to notice that rank 0's host is gone
LEADER_SECONDS = 3600.0  # for rank 0 to accept others, which has to fetch the data first
UNWIND_SECONDS = (2.0, 10.0)  # for a rank to come back from what it is doing when the run has failed, and for rank 0
NOTICE_SECONDS = 1.0  # for Elastic to find a worker of its own that was killed, before others end
POLL_SECONDS = 0.1


def is_leader() -> bool:
    """Return whether this worker is rank 0."""
    return os.environ["RANK"] == "0"


def lead(job: Job) -> None:
    """Train as rank 0, while a thread of this process supervises all ranks."""
    store = group_store(job.settings.timeout)
    info = rank_of_worker()
    alone = info.world_size == int(os.environ["LOCAL_WORLD_SIZE"])  # then no other host need reach this one
    hosts = (LOOPBACK,) if alone else own_addresses()
    with open_rendezvous(job, *hosts, listen=LOOPBACK if alone else "", secret=shared_secret(), only_once=True) as here:
        ticket = here.ticket(info)
        store.set(TICKET, json.dumps([ticket.hosts, ticket.port, str(ticket.run_folder), ticket.mark]))
        thread = threading.Thread(target=supervise, args=(here, info.world_size), name="launcher", daemon=True)
        thread.start()
        with local_run_folder(ticket) as folder:
            take_part(ticket, connect(replace(ticket, hosts=(LOOPBACK,)), folder), folder)
        thread.join()


def supervise(rendezvous: Rendezvous, num_ranks: int) -> None:
    """Supervise the ranks, which are told what is raised here; the function of the launcher's thread."""
    with suppress(UserError, RankError, StoppedError, KeyboardInterrupt):
        rendezvous.run(num_ranks, lambda: None)


def follow(fetch_into: Callable[[Path], object] | None = None, timeout: float = LEADER_SECONDS) -> None:
    """Train as another rank than 0, with the job that rank 0 gives.

    Args:
        fetch_into: puts the prepared data into a folder, on hosts without it; None: it is fetched from its origin.
        timeout: seconds to wait for rank 0, which first has its data come, and prepares the run.

    Raises:
        UnreachableError: this rank cannot connect to rank 0.
    """
    store = group_store(timeout)
    info = rank_of_worker()
    tried: set[str] = set()
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if store.check([TICKET]):  # store.get alone would block, and Python could handle no signal meanwhile
            ticket = read_ticket(store.get(TICKET), info)
            tried.update(ticket.hosts)
            with local_run_folder(ticket) as folder:
                try:
                    pipe = connect(ticket, folder)
                except (OSError, EOFError, AuthenticationError):
                    pass  # the ticket is stale: a store that outlives a restart still holds that of the run before
                else:
                    take_part(ticket, pipe, folder, fetch_into)
                    return
        time.sleep(POLL_SECONDS)
    known = f"at none of {', '.join(sorted(tried))}" if tried else "rank 0 never published its address"
    raise UnreachableError(
        f"rank {info.rank} could not connect to rank 0 within {timeout:g} s: {known}; its host must be reachable "
        f"from this one at any port, and {KEY_VARIABLE} the same on both, if it is set"
    )


def rank_of_worker() -> RankInfo:
    """Return which rank this worker is, by Elastic's environment variables."""
    return RankInfo(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))


def shared_secret() -> bytes:
    """Return what the run's key is made from: FLYTE_DDP_ELASTIC_KEY if set, else Elastic's run id.

    The run id is not secret: whoever can read Elastic's store knows it.
    """
    return (os.environ.get(KEY_VARIABLE) or os.environ[RUN_ID]).encode()


def read_ticket(text: bytes, info: RankInfo) -> JoinTicket:
    """Return this rank's ticket from what rank 0 has put into Elastic's store, in which the key is not."""
    hosts, port, run_folder, mark = json.loads(text)
    # Others reach MASTER_ADDR, as the store is there; if it is not rank 0's host, nobody there knows the key.
    reachable = tuple(dict.fromkeys((os.environ["MASTER_ADDR"], *hosts)))
    return JoinTicket(info, reachable, port, derive_key(shared_secret(), mark), Path(run_folder), mark)


def group_store(timeout: float) -> Any:
    """Return the store that Elastic has for each group of workers."""
    from torch.distributed import rendezvous  # type: ignore[attr-defined]

    from flyte_ddp.parallel.distributed import seconds

    return next(iter(rendezvous("env://", timeout=seconds(timeout))))[0]


def take_part(
    ticket: JoinTicket, pipe: Connection, folder: Path, fetch_into: Callable[[Path], object] | None = None
) -> None:
    """Run this worker's rank to the end of the run; raise what became of the run unless it has completed."""
    from flyte_ddp.launch.supervise.rank import run_rank

    info = ticket.info
    set_name(f"rank {info.rank}")
    try:
        job, host = receive_job(pipe, folder)
    except RunOverError as told:
        raise (told.outcome or rank_0_is_gone()) from None
    except (EOFError, OSError):
        raise rank_0_is_gone() from None
    use_network(host)
    link = WorkerLink(pipe, info.rank, saved=job.checkpoint.step if job.checkpoint else 0)
    # If this host does not see rank 0's run folder, its ranks write into that of one of them.
    mirrors = folder == job.run_folder != ticket.run_folder
    mirror = Mirror(folder, lambda piece: link.send(**piece)).following() if mirrors else nullcontext()
    # Elastic sends SIGTERM as soon as another worker has failed; it must not end this process before all is killed.
    with call_on_signals(SIGNALS, lambda: link.send("stop")), descendants_killed_at_end():
        try:
            with mirror:
                run_rank(replace(job, data=find_prepared_data(job, fetch_into)), info, link.offer_saving, link)
        except BaseException as error:
            link.report(error)
            link.send("exit", code=1)
            raise link.outcome() or error_without_outcome(error) from None
        link.send("completed")
        link.send("exit", code=0)
        if (outcome := link.outcome(limit=None)) is not None:  # others may still wait for what they handed in
            raise outcome


class WorkerLink(Link):
    """The connection of a rank whose process is a worker of Elastic's, and in which the run's outcome is raised."""

    def __init__(self, pipe: Connection, rank: int, saved: int) -> None:
        self.outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self.main = threading.get_ident()
        self.rank = rank
        self.heard = False
        self.unwinding = threading.Event()
        super().__init__(pipe, saved)

    def hear(self, message: dict[str, Any]) -> None:
        """See :class:`Link`."""
        if message["kind"] == "over":
            self.end(message["error"])
        elif message["kind"] == "stack":
            frame = sys._current_frames().get(self.main)
            self.send("stack", text="".join(traceback.format_stack(frame)).rstrip() if frame else "")
        else:
            super().hear(message)

    def launcher_is_gone(self) -> None:
        """See :class:`Link`."""
        self.end(rank_0_is_gone())

    def end(self, outcome: BaseException | None) -> None:
        """End the rank, and if it does not come back from what it is doing within UNWIND_SECONDS, this process.

        Only the first call has an effect: after its last message the launcher goes.
        """
        if self.heard:
            return
        self.heard = True
        if isinstance(outcome, RankError):
            time.sleep(NOTICE_SECONDS)  # Elastic's agent knows by which signal a worker of its host was killed
        self.outcomes.put(outcome)
        if outcome is not None and not self.unwinding.wait(UNWIND_SECONDS[self.rank == 0]):
            end_process(outcome)

    def outcome(self, limit: float | None = OUTCOME_SECONDS) -> BaseException | None:
        """Wait for the outcome of the run.

        Args:
            limit: seconds to wait at most; None: until the launcher says so, or is gone.

        Returns:
            None if the run has completed, or its outcome cannot be known.
        """
        self.unwinding.set()
        try:
            return self.outcomes.get(timeout=limit)
        except queue.Empty:
            return None


def rank_0_is_gone() -> RankError:
    """Return the error for a connection to rank 0 that has ended without an outcome."""
    return RankError("lost the connection to rank 0; see the log of rank 0's host for the cause", recoverable=True)


def error_without_outcome(error: BaseException) -> BaseException:
    """Return what a failed rank raises that has not been told the outcome of the run.

    That is its own error, unless this only says that a collective operation failed: then rank 0 is gone, too.
    """
    return error if classify_error(error) in OWN else rank_0_is_gone()


def end_process(outcome: BaseException) -> None:
    """Leave the outcome as Elastic's workers do that have failed, and end this process and those below it."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    with suppress(OSError):
        get_error_handler().record_exception(outcome)
    record(outcome)
    kill_descendants()
    os._exit(1)


@contextmanager
def recorded() -> Iterator[None]:
    """Leave what the block raises, as it is, for :func:`flyte_ddp.launch.elastic.failure`."""
    try:
        yield
    except BaseException as error:
        record(error)
        raise


def record(error: BaseException) -> None:
    """Pickle an error beside the file in which Elastic leaves its text, unless there is one already."""
    path = Path(os.environ[ERROR_FILE]).with_suffix(ERROR_SUFFIX)
    with suppress(Exception):  # an exception of a user's own may fail in any way when it is pickled
        if not path.exists():
            path.write_bytes(pickle.dumps(error))
