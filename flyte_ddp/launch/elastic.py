"""Launches ranks with torch Elastic, whose workers are the ranks: started here, by ``torchrun``, or by Flyte's plugin.

Elastic starts workers, finds out which rank each is, ends all of a host when one has ended badly, and starts all anew
as often as it may. What it does not do is done here, by a thread of rank 0 that watches over all ranks as other
launchers do: it finds out which failed first, and tells all of them, so that every host reports the same.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import secrets
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flyte_ddp import checkpoint
from flyte_ddp import hardware as machine
from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import RankError, StoppedError, UnreachableError, UserError
from flyte_ddp.hardware import Hardware
from flyte_ddp.job import Job, Place
from flyte_ddp.launch import room
from flyte_ddp.launch.agent import received, use_network
from flyte_ddp.launch.host_data import prepared_here
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.remote import Invitation, Meeting, come, meeting_place
from flyte_ddp.launch.spawn import main_script_hidden
from flyte_ddp.launch.stopping import SIGNALS, handed_on

RUN_ID = "TORCHELASTIC_RUN_ID"  # set in the processes that Elastic starts
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
INVITATION = "flyte-ddp invitation"
VERDICT_SECONDS = 30.0  # to hear what became of the run: more than its launcher takes to find out
UNWIND_SECONDS = (2.0, 10.0)  # for a rank to come back from what it is doing when the run has failed, and for rank 0
POLL_SECONDS = 0.1  # how often Elastic looks at its workers
NOTICE_SECONDS = 1.0  # for Elastic to find a worker of its own that was killed, before others end


def launch(job: Job, *, num_ranks: int, max_restarts: int = 0) -> None:
    """Runs the job: in a worker of Elastic's as its rank 0, anywhere else on this machine, with workers of its own.

    Args:
        num_ranks: of workers of its own.
        max_restarts: Elastic's own, of those: how often all are started anew when one has failed. The run then goes on
            from its newest checkpoint.

    Raises:
        UserError: the user's mistake, as the rank that failed first reported it.
        RankError: any other failure of a rank, named by the rank that failed first.
        StoppedError: the process got SIGTERM; for Ctrl-C it is a KeyboardInterrupt.

    """
    if RUN_ID in os.environ:
        lead(job)
    else:
        start(job, num_ranks, max_restarts)


def hardware(hp: Hyperparameters) -> Hardware:
    """What the ranks find, in a worker: Elastic has decided how many they are.

    Raises:
        UserError: hyperparameters that they cannot serve.
    """
    num_ranks, on_this_host = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if hp.num_ranks not in (0, num_ranks):
        message = f"num_ranks={hp.num_ranks}: Elastic has started {num_ranks} workers, so there will be {num_ranks}"
        print(message, file=sys.stderr, flush=True)
    gpus = machine.visible_gpus()
    device = room.device_type(hp, gpus if gpus >= on_this_host else 0, "Elastic's host, for each worker,")
    threads = max(1, machine.cores() // on_this_host)
    return machine.decide(hp, device, num_ranks, threads=threads, bf16=machine.has_bf16(device))


def is_leader() -> bool:
    """Whether this worker is rank 0."""
    return os.environ["RANK"] == "0"


def lead(job: Job) -> None:
    """What rank 0 does: a thread watches over all ranks while this one is what it is."""
    store = group_store(job.settings.timeout)
    with meeting_place(job, os.environ["MASTER_ADDR"]) as meeting:
        meeting.only_once = True
        place = Place(0, int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))
        invitation = meeting.invitation(place)
        store.set(INVITATION, pickle.dumps(invitation))
        thread = threading.Thread(target=watch_over, args=(meeting, place.world_size), name="launcher", daemon=True)
        thread.start()
        take_part(place, job.run_folder, come(invitation))
        thread.join()


def watch_over(meeting: Meeting, num_ranks: int) -> None:
    """What the launcher's thread does; its ranks are told what it raises."""
    with suppress(UserError, RankError, StoppedError, KeyboardInterrupt):
        meeting.run(num_ranks, lambda: None)


def follow(fetch_into: Callable[[Path], object] | None = None, timeout: float = 600.0) -> None:
    """What all other ranks do: they get the job from rank 0.

    Args:
        fetch_into: puts the prepared data into a folder, on hosts without it; None: it is fetched from its origin.
        timeout: seconds to wait for rank 0, which first prepares the run.

    Raises:
        UnreachableError: rank 0 does not let this one in.
    """
    store = group_store(timeout)
    place = Place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if store.check([INVITATION]):  # and not store.get, in which no signal would be handled
            invitation: Invitation = pickle.loads(store.get(INVITATION))
            with suppress(ConnectionError, EOFError):  # of an invitation to the run before, in a store that is kept
                arrival = come(replace(invitation, place=place))
                break
        time.sleep(POLL_SECONDS)
    else:
        raise UnreachableError(
            f"rank 0 did not let rank {place.rank} in within {timeout:g} s: its host, {os.environ['MASTER_ADDR']},"
            " must be reachable from this one"
        )
    take_part(place, invitation.run_folder, arrival, fetch_into)


def group_store(timeout: float) -> Any:
    """The store that Elastic has for each group of workers."""
    from torch.distributed import rendezvous  # type: ignore[attr-defined]

    from flyte_ddp.distributed import seconds

    return next(iter(rendezvous("env://", timeout=seconds(timeout))))[0]


def take_part(
    place: Place,
    shared: Path,
    arrival: tuple[Connection, str, bool],
    fetch_into: Callable[[Path], object] | None = None,
) -> None:
    """Runs this worker's rank to the end of the run; raises what became of it where that is not its completion.

    Args:
        place: which rank it is.
        shared: the run folder where that is shared.
        arrival: what :func:`come` returns.
        fetch_into: see :func:`follow`.
    """
    from flyte_ddp.launch.rank import run_rank

    pipe, host, shares = arrival
    use_network(host)
    with folder_of(shared if shares else None) as folder:
        job = received(pipe, folder, shares=shares)
        link = WorkerLink(pipe, job.checkpoint.step if job.checkpoint else 0, place.rank)
        with handed_on(SIGNALS, lambda: link.send("stop")):
            try:
                run_rank(replace(job, data=prepared_here(job, fetch_into)), place, link.offer_saving, link)
            except BaseException as error:
                link.report(error)
                link.send("exit", code=1)
                raise link.verdict() or error from None
            link.send("completed")
            link.send("exit", code=0)
            verdict = link.verdict()
            if verdict is not None:
                raise verdict


@contextmanager
def folder_of(shared: Path | None) -> Iterator[Path]:
    """The run folder, or one for this rank only."""
    if shared is not None:
        yield shared
        return
    with tempfile.TemporaryDirectory(prefix="flyte-ddp-run-") as own:
        yield Path(own)


class WorkerLink(Link):
    """The connection of a rank whose process is Elastic's: what the launcher finds is raised here, by every rank."""

    def __init__(self, pipe: Connection, saved: int, rank: int) -> None:
        self.verdicts: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self.main = threading.get_ident()
        self.rank = rank
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
        self.end(RankError("rank 0 has ended, and its host knows why", recoverable=True))

    def end(self, verdict: BaseException | None) -> None:
        """Has the rank end, and if it does not come back from what it is doing, this process."""
        if isinstance(verdict, RankError):
            time.sleep(NOTICE_SECONDS)  # Elastic itself knows more of a worker of its host that was killed
        self.verdicts.put(verdict)
        if verdict is not None:
            timer = threading.Timer(UNWIND_SECONDS[self.rank == 0], end_process, (verdict,))
            timer.daemon = True
            timer.start()

    def verdict(self) -> BaseException | None:
        """What became of the run; None if that is its completion, or cannot be known."""
        try:
            return self.verdicts.get(timeout=VERDICT_SECONDS)
        except queue.Empty:
            return None


def end_process(verdict: BaseException) -> None:
    """Ends this process as Elastic's workers end that have failed."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    with suppress(OSError):
        get_error_handler().record_exception(verdict)
    record(verdict)
    os._exit(1)


@contextmanager
def recorded() -> Iterator[None]:
    """Leaves what is raised, as it is, for :func:`failure`."""
    try:
        yield
    except BaseException as error:
        record(error)
        raise


def record(error: BaseException) -> None:
    """Leaves an error beside the file in which Elastic leaves its text, unless there is one already."""
    path = Path(os.environ[ERROR_FILE]).with_suffix(".pickle")
    with suppress(OSError, pickle.PicklingError, TypeError, AttributeError):
        if not path.exists():
            path.write_bytes(pickle.dumps(error))


def start(job: Job, num_ranks: int, max_restarts: int) -> None:
    """Runs the job with workers of this process's own."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with (
        log_kept_quiet(),
        surroundings_kept(),
        tempfile.TemporaryDirectory(prefix="flyte-ddp-elastic-") as logs,
        main_script_hidden(),
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            run_id=secrets.token_hex(8),
            local_addr="127.0.0.1",
            max_restarts=max_restarts,
            monitor_interval=POLL_SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        try:
            elastic_launch(config, worker)(job)
        except ChildFailedError as error:
            raise failure(error) from None
        except SignalException as stopped:
            found = checkpoint.newest_of(job.run_folder / checkpoint.FOLDER)
            if stopped.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise StoppedError(stopped.sigval.name, found.step if found else 0) from None


def worker(job: Job) -> None:
    """What each of them does."""
    with recorded():
        if not is_leader():
            follow(timeout=job.settings.timeout)
            return
        if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
            job = replace(job, checkpoint=checkpoint.go_on_from(job.run_folder, job.identity))
            if job.settings.progress != "off":
                step = job.checkpoint.step if job.checkpoint else 0
                print(f"Elastic has started all ranks anew; going on after step {step:,}", file=sys.stderr, flush=True)
        lead(job)


def failure(error: Any) -> BaseException:
    """What a worker raised, or how it ended.

    Args:
        error: Elastic's ChildFailedError.
    """
    rank, first = error.get_first_failure()
    if first.exitcode < 0:
        name = signal.Signals(-first.exitcode).name
        hint = ", which is often the kernel's out-of-memory killer" if name == "SIGKILL" else ""
        return RankError(f"rank {rank} was killed by {name}{hint}", recoverable=True)
    try:
        raised = pickle.loads(Path(first.error_file).with_suffix(".pickle").read_bytes())
    except (OSError, pickle.UnpicklingError):
        raised = None
    if isinstance(raised, (UserError, UnreachableError, RankError, StoppedError)):
        return raised
    return RankError(f"rank {rank}: {first.message}")


@contextmanager
def log_kept_quiet() -> Iterator[None]:
    """Has Elastic not print how its workers ended: what of it matters is raised."""
    loggers = [logging.getLogger(f"torch.{name}") for name in ("distributed.elastic", "multiprocessing.spawn")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def surroundings_kept() -> Iterator[None]:
    """Puts back what Elastic changes in this process: handlers of signals, and environment."""
    environment = dict(os.environ)
    in_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for name in os.environ.keys() - environment.keys():
            if name.startswith(("TORCHELASTIC_", "TORCH_")):
                del os.environ[name]
        for number, handler in handlers.items() if in_main else ():
            signal.signal(number, handler)
