"""Launches ranks as workers of torch Elastic, started by this process, ``torchrun`` or Flyte's plugin.

Elastic may report a follow-up failure before the root cause. Therefore a thread of rank 0 supervises the ranks, as in
other launchers. The thread sends the run's outcome to all ranks, so every host reports the same error.
"""

import json
import logging
import os
import pickle
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from flyte_ddp.core.errors import RankError, StoppedError, UnreachableError, UserError, print_to_stderr
from flyte_ddp.core.launch.remote import connection, rendezvous
from flyte_ddp.core.launch.remote.elastic_link import ERROR_SUFFIX, WorkerLink, lost_rank_0_error, write_exception
from flyte_ddp.core.launch.supervise.failures import killed_rank_error
from flyte_ddp.core.launch.supervise.link import RankInfo
from flyte_ddp.core.launch.supervise.network import LOOPBACK, host_addresses, set_network_interface
from flyte_ddp.core.launch.supervise.restarts import run_with_restarts
from flyte_ddp.core.launch.supervise.stopping import StopRequest, call_on_signals, catch_stop_signals, stop_error
from flyte_ddp.core.machine import process, resources
from flyte_ddp.core.machine.process import hide_main_script, stop_signals
from flyte_ddp.core.machine.resources import Request, World
from flyte_ddp.core.runs import checkpoint
from flyte_ddp.core.runs.work import Restart, Work

RUN_ID = "TORCHELASTIC_RUN_ID"  # environment variable of the processes that Elastic starts
KEY_VARIABLE = "FLYTE_DDP_ELASTIC_KEY"
RESTARTS_VARIABLE = "FLYTE_DDP_ELASTIC_RESTARTS"  # the restarts in place, as JSON for the workers
TICKET = "flyte-ddp ticket"  # key in Elastic's store
RANK_0_SECONDS = 3600.0  # for rank 0 to accept other ranks, because rank 0 may have to fetch the data first
POLL_SECONDS = 0.1
NEVER_SECONDS = 1_000_000
Value = TypeVar("Value")
Prepare = Callable[[Work], Work]  # adapts rank 0's work to this host, such as by fetching the data


def find_world(request: Request) -> World:
    """Return the World of Elastic's workers. If this process is not one of the workers, return this machine's World.

    If the request has another number of ranks than Elastic has workers, prints that Elastic's number counts.

    Raises:
        UserError: ``backend`` is nccl, and this host has fewer GPUs than workers.
        UserError: This process is no worker, and the machine has too few GPUs, or another number than FLYTE_DDP_GPUS.
    """
    if RUN_ID not in os.environ:
        return resources.detect_world(request)
    num_ranks, on_this_host = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if request.num_ranks not in (0, num_ranks):
        what = f"num_ranks={request.num_ranks}: Elastic has started {num_ranks} workers"
        print_to_stderr(f"{what}; running {num_ranks} ranks")
    gpus = resources.count_gpus()  # assumes that all hosts have equally many
    lack = f"this host has {gpus} GPU(s) for {on_this_host} Elastic workers"
    device = resources.choose_device_type(request.backend, gpus >= on_this_host, lack)
    return World(num_ranks, device, max(1, resources.count_cores() // on_this_host))


def launch(work: Work, *, retries: int = 0) -> None:
    """Run the work as rank 0 if Elastic has started this process, else start a worker for each rank here.

    After a failure, Elastic restarts all workers up to ``retries`` times. Later restarts are in place, by this process.
    At the end, kills the processes that this thread has started. Raises the errors of all launchers
    (:mod:`flyte_ddp.core.launch`).
    """
    work = work.choose_world(find_world)
    if RUN_ID in os.environ:
        run_as_rank_0(replace(work, restarts=read_restarts()))
        return
    with catch_stop_signals() as stop:  # between two starts, and while torch is imported
        run_with_restarts(work, lambda work: start_workers(work, retries, stop), stop)


@contextmanager
def pass_restarts_to_workers(restarts: Sequence[Restart]) -> Iterator[None]:
    """Pass the restarts in place to the workers that start in the block. Rank 0 records the restarts."""
    os.environ[RESTARTS_VARIABLE] = json.dumps([asdict(restart) for restart in restarts])
    try:
        yield
    finally:
        del os.environ[RESTARTS_VARIABLE]


def read_restarts() -> tuple[Restart, ...]:
    return tuple(Restart(**values) for values in json.loads(os.environ.get(RESTARTS_VARIABLE, "[]")))


def start_workers(work: Work, retries: int, stop: StopRequest) -> None:
    """Start Elastic's workers on this machine, and wait for their end.

    Raises the error of a failed run. After a signal, raises StoppedError or KeyboardInterrupt with the newest
    checkpoint's step. At the end kills the processes that this thread has started.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    def end_start(number: int, _: FrameType | None) -> None:
        raise stop_error(signal.Signals(number), checkpoint.newest_step(work.output_folder))

    with (
        silence_elastic_logs(),
        restore_process_state(),
        tempfile.TemporaryDirectory(prefix="flyte-ddp-elastic-") as logs,
        hide_main_script(),
        process.kill_new_descendants_at_end(),
    ):
        # Elastic's stores have no password, and torch opens a TCP store to the whole network.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=work.world.num_ranks,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{logs}/store",
            # No other host needs a keep-alive, and after a stop torch would look for the file for minutes.
            rdzv_configs={"store_type": "file", "keep_alive_interval": NEVER_SECONDS},
            run_id=secrets.token_hex(8),
            local_addr=LOOPBACK,
            max_restarts=retries,
            monitor_interval=POLL_SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            signals_to_handle=",".join([*(number.name for number in stop_signals()), "SIGQUIT"]),
        )
        memory_kills = process.count_out_of_memory_kills()
        try:
            with process.signal_handlers(dict.fromkeys(stop_signals(), end_start)):  # until Elastic sets its handlers
                if stop.signal is not None:
                    end_start(stop.signal, None)
                elastic_launch(config, run_local_worker)(work, secrets.token_hex(32), f"{logs}/tickets")
        except ChildFailedError as error:
            raise first_worker_error(error, memory_kills) from None
        except SignalException as stopped:
            raise stop_error(stopped.sigval, checkpoint.newest_step(work.output_folder)) from None


@contextmanager
def silence_elastic_logs() -> Iterator[None]:
    """Turn off the logs of Elastic and of torch's spawn in the block.

    The logs only repeat the error that the launcher raises.
    """
    with ExitStack() as at_end:
        for name in ("distributed.elastic", "multiprocessing.spawn"):
            logger = logging.getLogger(f"torch.{name}")
            at_end.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL)
        yield


@contextmanager
def restore_process_state() -> Iterator[None]:
    """Restore after the block the signal handlers, and remove the environment variables that Elastic has added."""
    names = {*os.environ}
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    try:
        with process.signal_handlers({number: signal.getsignal(number) for number in numbers}):
            yield
    finally:
        for name in os.environ.keys() - names:
            if name.startswith(("TORCHELASTIC_", "TORCH_")):
                del os.environ[name]


def first_worker_error(error: Any, memory_kills: int) -> BaseException:
    """Return the exception of the worker that failed first in a ChildFailedError.

    If the worker has left no exception, returns an error with its signal, exit code or message. ``memory_kills`` is the
    count of out-of-memory kills before the workers started.
    """
    rank, first = error.get_first_failure()
    if first.exitcode < 0:
        out_of_memory = process.count_out_of_memory_kills() > memory_kills
        return killed_rank_error(rank, signal.Signals(-first.exitcode), out_of_memory=out_of_memory)
    if not Path(first.error_file).exists():  # then Elastic's message only explains how to get tracebacks
        return RankError(f"rank {rank} ended with exit code {first.exitcode} before it had finished")
    try:
        raised = pickle.loads(Path(first.error_file).with_suffix(ERROR_SUFFIX).read_bytes())
    except Exception:  # unpickling a user-defined exception may raise anything
        raised = None
    if isinstance(raised, (UserError, RankError, StoppedError)):
        return raised
    return RankError(f"rank {rank}: {first.message}")


def run_in_worker(
    lead: Callable[[], Value], prepare: Prepare = Work.prepare_on_host, tickets: str = ""
) -> Value | None:
    """Call ``lead`` in rank 0's worker and return its value. In other workers run rank 0's work, and return None.

    Call this function in each of Elastic's workers. All workers raise the error of a failed run. The error is also
    pickled to a file, because Elastic passes on only text.

    Args:
        lead: Runs the work as rank 0.
        prepare: Changes rank 0's work in another worker, such as by fetching the data.
        tickets: The path of a file for the ranks' tickets. If empty, the tickets go through Elastic's store.
    """
    try:
        if is_leader():
            return lead()
        follow(prepare, tickets)
    except BaseException as error:
        write_exception(error)
        raise
    return None


def run_local_worker(work: Work, key: str, tickets: str) -> None:
    """Run this Elastic worker's part of a run. After a restart by Elastic, first rewind the run's folder.

    Args:
        work: The work of the run.
        key: The run's secret, which is put into the environment.
        tickets: The path of a file for the ranks' tickets. Each restart adds its number to the path.
    """
    os.environ[KEY_VARIABLE] = key
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    tickets = f"{tickets}-{restarts}"

    def lead() -> None:
        why = "Elastic has restarted all ranks"
        run_as_rank_0(work if restarts == "0" else rendezvous.rewind_work(work, why), tickets)

    run_in_worker(lead, tickets=tickets)


def is_leader() -> bool:
    return os.environ["RANK"] == "0"


def run_as_rank_0(work: Work, tickets: str = "") -> None:
    """Run the work as rank 0 in this process, and supervise all ranks in a thread.

    ``tickets`` is the path of a file for the ranks' tickets. If empty, the tickets go through Elastic's store. Raises
    the error of a failed run.
    """
    store, info = open_ticket_store(work.settings.timeout, tickets)
    alone = info.world_size == int(os.environ["LOCAL_WORLD_SIZE"])  # no other host needs to reach this host
    hosts = (LOOPBACK,) if alone else host_addresses()

    def supervise() -> None:
        with suppress(UserError, RankError, StoppedError, KeyboardInterrupt):  # this rank raises the error, too
            meeting.run_ranks(lambda: None)

    with rendezvous.open_rendezvous(
        work, *hosts, listen=LOOPBACK if alone else "", secret=shared_secret(), only_once=True
    ) as meeting:
        ticket = meeting.make_ticket(info)
        store.set(TICKET, json.dumps([ticket.hosts, ticket.port, str(ticket.output_folder), ticket.visibility_file]))
        thread = threading.Thread(target=supervise, name="launcher", daemon=True)
        thread.start()
        with connection.open_local_folder(ticket) as folder:
            pipe = connection.connect_to_launcher(replace(ticket, hosts=(LOOPBACK,)), folder)
            run_worker_rank(ticket, pipe, folder)
        thread.join()


def follow(prepare: Prepare = Work.prepare_on_host, tickets: str = "") -> None:
    """Wait for rank 0, and run its work as another rank in this process.

    If the run has failed, raises the run's error.

    Args:
        prepare: Changes rank 0's work for this host.
        tickets: The path of a file for the ranks' tickets. If empty, the tickets go through Elastic's store.

    Raises:
        UnreachableError: Rank 0 cannot be reached within an hour.
    """
    store, info = open_ticket_store(RANK_0_SECONDS, tickets)
    deadline = time.monotonic() + RANK_0_SECONDS
    while time.monotonic() < deadline:
        if store.check([TICKET]):  # store.get alone would block in C++, where Python handles no signal
            ticket = read_ticket(store.get(TICKET), info)
            with connection.open_local_folder(ticket) as folder:
                try:
                    pipe = connection.connect_to_launcher(ticket, folder)
                except (OSError, EOFError, AuthenticationError):
                    pass  # an old ticket stays in the store after a restart, until rank 0 sets a new ticket
                else:
                    run_worker_rank(ticket, pipe, folder, prepare)
                    return
        time.sleep(POLL_SECONDS)
    raise UnreachableError(
        f"rank {info.rank} could not connect to rank 0 within {RANK_0_SECONDS:g} s; rank 0's host must be reachable "
        f"from this host on any port, and {KEY_VARIABLE}, if set, must be the same on both hosts"
    )


def open_ticket_store(timeout: float, tickets: str) -> tuple[Any, RankInfo]:
    """Return the store for the ranks' tickets, and this rank's place.

    The store is the file ``tickets``, or else a client of Elastic's store. Waits up to ``timeout`` seconds for
    Elastic's store.
    """
    from torch.distributed import FileStore  # type: ignore[attr-defined]
    from torch.distributed import rendezvous as connect_to_store  # type: ignore[attr-defined]

    info = RankInfo(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))
    if tickets:
        return FileStore(tickets), info
    return next(iter(connect_to_store("env://", timeout=timedelta(seconds=timeout))))[0], info


def shared_secret() -> bytes:
    return (os.environ.get(KEY_VARIABLE) or os.environ[RUN_ID]).encode()  # Elastic's open store shows the run id, too


def read_ticket(text: bytes, info: RankInfo) -> connection.JoinTicket:
    """Return the ticket that rank 0 has put into the store as JSON. The first address of the ticket is MASTER_ADDR."""
    hosts, port, output_folder, mark = json.loads(text)
    # All ranks reach MASTER_ADDR, where the store is. If it is not rank 0's host, no program there can prove the key.
    reachable = tuple(dict.fromkeys((os.environ["MASTER_ADDR"], *hosts)))
    key = rendezvous.derive_key(shared_secret(), mark)
    return connection.JoinTicket(info, reachable, port, key, Path(output_folder), mark)


def run_worker_rank(
    ticket: connection.JoinTicket, pipe: Connection, folder: Path, prepare: Prepare = Work.prepare_on_host
) -> None:
    """Run this rank's work, wait for the run's outcome, and raise the run's error.

    If this rank fails, waits up to 45 s for the outcome, else without a limit. Kills the processes that were started
    meanwhile.

    Args:
        ticket: The ticket of the rank.
        pipe: The open connection to rank 0.
        folder: This host's folder for the files of the run.
        prepare: Changes the work for this host.
    """
    from flyte_ddp.core.launch.supervise.rank import run_rank

    process.set_process_name(f"rank {ticket.info.rank}")
    try:
        work, host = connection.receive_work(pipe, folder)
    except connection.RunOverError as told:
        raise (told.outcome or lost_rank_0_error()) from None
    except (EOFError, OSError):
        raise lost_rank_0_error() from None
    set_network_interface(host)
    run_folder = work.output_folder if work.sees_run_folder else None
    link = WorkerLink(pipe, ticket.info.rank, work.checkpoint.step if work.checkpoint else 0, run_folder)
    # Elastic sends SIGTERM when another worker has failed. The signal must not end this process before its descendants.
    with call_on_signals(stop_signals(), lambda: link.send("stop")), process.kill_new_descendants_at_end():
        try:
            run_rank(prepare(work), ticket.info, link.offer_saving, link)
        except BaseException as error:
            link.report_error(error)
            outcome = link.wait_for_outcome(error)
            link.send("exit", code=1)
            raise outcome or error from None
        link.send("completed")
        link.send("exit", code=0)
        if (outcome := link.wait_for_outcome()) is not None:
            raise outcome
