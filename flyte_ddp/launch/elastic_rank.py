"""What each worker of torch Elastic does: it is a rank, and the worker that is rank 0 also supervises all ranks.

Elastic only reports that some worker on each host has exited, and a follow-up failure can be recorded before the root
cause. So a thread of rank 0 supervises the ranks as other launchers do. It sends the run's outcome to all ranks, and
each raises it, so that every host reports the same error.
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
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flyte_ddp.errors import RankError, StoppedError, UnreachableError, UserError
from flyte_ddp.launch.remote.file_sync import FileSender
from flyte_ddp.launch.remote.host_data import find_or_fetch_data
from flyte_ddp.launch.remote.joining import (
    JoinTicket,
    RunOverError,
    connect_to_launcher,
    open_local_run_folder,
    receive_job,
)
from flyte_ddp.launch.remote.rendezvous import Rendezvous, derive_key, open_rendezvous
from flyte_ddp.launch.supervise.failures import OWN
from flyte_ddp.launch.supervise.link import Link, classify_failure
from flyte_ddp.launch.supervise.network import host_addresses, set_network_interface
from flyte_ddp.launch.supervise.rank_process import RankInfo
from flyte_ddp.launch.supervise.stopping import SIGNALS, call_on_signals
from flyte_ddp.process import kill_descendants, kill_new_descendants_at_end, set_process_name
from flyte_ddp.runs.job import Job

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # variable with the path at which Elastic expects a worker's error as text
ERROR_SUFFIX = ".pickle"  # of the file beside it that holds the exception
TICKET = "flyte-ddp ticket"  # key in Elastic's store
RUN_ID = "TORCHELASTIC_RUN_ID"  # variable that is set in the processes that Elastic starts
KEY_VARIABLE = "FLYTE_DDP_ELASTIC_KEY"
LOOPBACK = "127.0.0.1"
OUTCOME_SECONDS = 45.0  # for the run's outcome to come: more than the kernel needs to notice that a host is gone
RANK_0_SECONDS = 3600.0  # for rank 0 to accept other ranks: it may have to fetch the data first
UNWIND_SECONDS = (2.0, 10.0)  # for a rank, and for rank 0, to raise an exception after the run has failed
NOTICE_SECONDS = 1.0  # for Elastic to find a worker that was killed, before other workers exit
POLL_SECONDS = 0.1


def is_leader() -> bool:
    """Return whether this worker is rank 0."""
    return os.environ["RANK"] == "0"


def train_as_rank_0(job: Job) -> None:
    """Train as rank 0 in this process, while a thread of it supervises all ranks.

    Publishes this process's address in Elastic's store. Kills at the end what this thread has started.

    Raises:
        UserError, RankError, StoppedError, KeyboardInterrupt: the run's outcome, as in all ranks.
    """
    store = open_group_store(job.settings.timeout)
    info = worker_rank_info()
    alone = info.world_size == int(os.environ["LOCAL_WORLD_SIZE"])  # then no other host need reach this one
    hosts = (LOOPBACK,) if alone else host_addresses()
    with open_rendezvous(job, *hosts, listen=LOOPBACK if alone else "", secret=shared_secret(), only_once=True) as here:
        ticket = here.make_ticket(info)
        store.set(TICKET, json.dumps([ticket.hosts, ticket.port, str(ticket.run_folder), ticket.mark]))
        thread = threading.Thread(target=supervise_ranks, args=(here, info.world_size), name="launcher", daemon=True)
        thread.start()
        with open_local_run_folder(ticket) as folder:
            run_worker_rank(ticket, connect_to_launcher(replace(ticket, hosts=(LOOPBACK,)), folder), folder)
        thread.join()


def supervise_ranks(rendezvous: Rendezvous, num_ranks: int) -> None:
    """Supervise all ranks until the run has ended, and send them its outcome; the function of a thread."""
    with suppress(UserError, RankError, StoppedError, KeyboardInterrupt):
        rendezvous.run_ranks(num_ranks, lambda: None)


def follow(fetch_into: Callable[[Path], object] | None = None, timeout: float = RANK_0_SECONDS) -> None:
    """Connect to rank 0, receive the job, and train as another rank than 0.

    Args:
        fetch_into: puts the prepared data into a folder, on hosts without it; None: fetch it from its source.
        timeout: seconds to wait for rank 0, which may have to fetch the data first.

    Raises:
        UnreachableError: this rank cannot connect to rank 0 in time.
        UserError, RankError, StoppedError, KeyboardInterrupt: the run's outcome, as in all ranks.
    """
    store = open_group_store(timeout)
    info = worker_rank_info()
    tried: set[str] = set()
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if store.check([TICKET]):  # store.get alone would block in C++, where Python handles no signal
            ticket = read_ticket(store.get(TICKET), info)
            tried.update(ticket.hosts)
            with open_local_run_folder(ticket) as folder:
                try:
                    pipe = connect_to_launcher(ticket, folder)
                except (OSError, EOFError, AuthenticationError):
                    pass  # the ticket is of the run before a restart, which the store has outlived
                else:
                    run_worker_rank(ticket, pipe, folder, fetch_into)
                    return
        time.sleep(POLL_SECONDS)
    known = f"at none of {', '.join(sorted(tried))}" if tried else "rank 0 never published its address"
    raise UnreachableError(
        f"rank {info.rank} could not connect to rank 0 within {timeout:g} s: {known}; its host must be reachable "
        f"from this one at any port, and {KEY_VARIABLE} the same on both, if it is set"
    )


def worker_rank_info() -> RankInfo:
    """Return this worker's rank, world size and local rank, by Elastic's environment variables."""
    return RankInfo(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))


def shared_secret() -> bytes:
    """Return the secret of the run's key: FLYTE_DDP_ELASTIC_KEY if set, else Elastic's run id.

    Whoever can read Elastic's store knows the run id.
    """
    return (os.environ.get(KEY_VARIABLE) or os.environ[RUN_ID]).encode()


def read_ticket(text: bytes, info: RankInfo) -> JoinTicket:
    """Return this rank's ticket from the JSON that rank 0 has put into Elastic's store, and from the shared secret.

    MASTER_ADDR is added as the first address.
    """
    hosts, port, run_folder, mark = json.loads(text)
    # Ranks reach MASTER_ADDR, because the store is there. If it is not rank 0's host, nobody there knows the key.
    reachable = tuple(dict.fromkeys((os.environ["MASTER_ADDR"], *hosts)))
    return JoinTicket(info, reachable, port, derive_key(shared_secret(), mark), Path(run_folder), mark)


def open_group_store(timeout: float) -> Any:
    """Connect to the store that Elastic runs for this group of workers, and return it.

    Args:
        timeout: seconds for each of its operations.
    """
    from torch.distributed import rendezvous  # type: ignore[attr-defined]

    return next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout))))[0]


def run_worker_rank(
    ticket: JoinTicket, pipe: Connection, folder: Path, fetch_into: Callable[[Path], object] | None = None
) -> None:
    """Receive the job, run this worker's rank, and wait until the run has ended; close nothing.

    May fetch the prepared data. Sends rank 0 the results of this host, if the host does not see the run folder. Kills
    at the end what this thread has started. SIGTERM and Ctrl-C make rank 0 stop all ranks.

    Raises:
        UserError, RankError, StoppedError, KeyboardInterrupt: the run's outcome, as in all ranks.
    """
    from flyte_ddp.launch.supervise.rank import run_rank

    info = ticket.info
    set_process_name(f"rank {info.rank}")
    try:
        job, host = receive_job(pipe, folder)
    except RunOverError as told:
        raise (told.outcome or lost_rank_0_error()) from None
    except (EOFError, OSError):
        raise lost_rank_0_error() from None
    set_network_interface(host)
    link = WorkerLink(pipe, info.rank, saved=job.checkpoint.step if job.checkpoint else 0)
    # If this host does not see rank 0's run folder, its ranks write into the folder of one of them, which sends their
    # results. Outputs are written by rank 0 only.
    files = (
        FileSender(folder, lambda piece: link.send(**piece)) if folder == job.run_folder != ticket.run_folder else None
    )
    # Elastic sends SIGTERM as soon as another worker has failed. It must not end this process before its descendants.
    with (
        call_on_signals(SIGNALS, lambda: link.send("stop")),
        kill_new_descendants_at_end(),
        files.send_results_during() if files else nullcontext(),
    ):
        try:
            run_rank(replace(job, data=find_or_fetch_data(job, fetch_into)), info, link.set_save_function, link)
            if files:
                files.send_results()
        except BaseException as error:
            link.report_error(error)
            if files:
                files.send_results()
            link.send("exit", code=1)
            raise link.wait_for_outcome() or error_without_outcome(error) from None
        link.send("completed")
        link.send("exit", code=0)
        # Without a limit: other hosts may still be sending results.
        if (outcome := link.wait_for_outcome(limit=None)) is not None:
            raise outcome


class WorkerLink(Link):
    """The connection to rank 0 of a worker of Elastic's. It also receives the run's outcome.

    Starts a thread that handles messages; must be made in the thread that trains.
    """

    def __init__(self, pipe: Connection, rank: int, saved: int) -> None:
        self.outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self.main = threading.get_ident()
        self.rank = rank
        self.has_outcome = False
        self.unwinding = threading.Event()
        super().__init__(pipe, saved)

    def handle_message(self, message: dict[str, Any]) -> None:
        """Do what a message of rank 0's asks for: end this rank, send its stack, or what other ranks do."""
        if message["kind"] == "over":
            self.end_rank(message["error"])
        elif message["kind"] == "stack":
            frame = sys._current_frames().get(self.main)
            self.send("stack", text="".join(traceback.format_stack(frame)).rstrip() if frame else "")
        else:
            super().handle_message(message)

    def handle_lost_launcher(self) -> None:
        """End this rank: the run's outcome is that the connection to rank 0 was lost."""
        self.end_rank(lost_rank_0_error())

    def end_rank(self, outcome: BaseException | None) -> None:
        """Give the outcome to wait_for_outcome. Exit this process if nobody calls that within UNWIND_SECONDS.

        Only the first call has an effect: after the outcome, the end of the connection says nothing new.
        """
        if self.has_outcome:
            return
        self.has_outcome = True
        if isinstance(outcome, RankError):
            time.sleep(NOTICE_SECONDS)  # Elastic reports the worker that it sees exit first: the killed one should be
        self.outcomes.put(outcome)
        if outcome is not None and not self.unwinding.wait(UNWIND_SECONDS[self.rank == 0]):
            record_and_exit(outcome)

    def wait_for_outcome(self, limit: float | None = OUTCOME_SECONDS) -> BaseException | None:
        """Wait for the run's outcome and return it: the error, or None if the run has completed.

        Args:
            limit: seconds after which None is returned, too; None: wait until the outcome comes or rank 0 is gone.
        """
        self.unwinding.set()
        try:
            return self.outcomes.get(timeout=limit)
        except queue.Empty:
            return None


def lost_rank_0_error() -> RankError:
    """Return the recoverable error for a connection to rank 0 that has ended before the run's outcome came."""
    return RankError("lost the connection to rank 0; see the log of rank 0's host for the cause", recoverable=True)


def error_without_outcome(error: BaseException) -> BaseException:
    """Return the error that a failed rank raises if the run's outcome has not come.

    That is the rank's own error. But if a collective operation failed, rank 0 is most likely gone, too.
    """
    return error if classify_failure(error) in OWN else lost_rank_0_error()


def record_and_exit(outcome: BaseException) -> None:
    """Write the outcome to Elastic's error file and to the pickle beside it, kill all descendants, and exit with 1."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    with suppress(OSError):
        get_error_handler().record_exception(outcome)
    pickle_error(outcome)
    kill_descendants()
    os._exit(1)


@contextmanager
def pickle_exception() -> Iterator[None]:
    """Pickle an exception of the block to a file beside Elastic's error file, where elastic.first_worker_error finds it."""
    try:
        yield
    except BaseException as error:
        pickle_error(error)
        raise


def pickle_error(error: BaseException) -> None:
    """Pickle an error to a file beside Elastic's error file, unless that file exists; ignore all exceptions."""
    path = Path(os.environ[ERROR_FILE]).with_suffix(ERROR_SUFFIX)
    with suppress(Exception):  # pickling a user's own exception may raise anything
        if not path.exists():
            path.write_bytes(pickle.dumps(error))
