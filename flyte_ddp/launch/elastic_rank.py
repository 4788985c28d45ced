"""What torch Elastic's workers do, which are the ranks: rank 0 leads, the others follow, and all hear the same verdict.

A thread of rank 0 watches over all ranks as other launchers do, as Elastic knows of each host's workers only that one
has ended, and by its clock a victim may end first. What it finds is told to all ranks, and each raises it, so that
every host reports the same.
"""

from __future__ import annotations

import os
import pickle
import queue
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

from flyte_ddp.errors import RankError, StoppedError, UnreachableError, UserError
from flyte_ddp.job import Job
from flyte_ddp.launch.host_data import prepared_here
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.network import use_network
from flyte_ddp.launch.place import Place
from flyte_ddp.launch.rank_process import set_name
from flyte_ddp.launch.remote import Invitation, Meeting, come, meeting_place
from flyte_ddp.launch.standing import received
from flyte_ddp.launch.stopping import SIGNALS, handed_on

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
ERROR_SUFFIX = ".pickle"  # of what is left beside it
INVITATION = "flyte-ddp invitation"
VERDICT_SECONDS = 30.0  # to hear what became of the run: more than its launcher takes to find out
LEADER_SECONDS = 3600.0  # for rank 0 to let others in, which has to fetch the data first
UNWIND_SECONDS = (2.0, 10.0)  # for a rank to come back from what it is doing when the run has failed, and for rank 0
NOTICE_SECONDS = 1.0  # for Elastic to find a worker of its own that was killed, before others end
POLL_SECONDS = 0.1


def is_leader() -> bool:
    """Whether this worker is rank 0."""
    return os.environ["RANK"] == "0"


def lead(job: Job) -> None:
    """What rank 0 does: a thread watches over all ranks while this one is what it is."""
    store = group_store(job.settings.timeout)
    with meeting_place(job, os.environ["MASTER_ADDR"], only_once=True) as meeting:
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


def follow(fetch_into: Callable[[Path], object] | None = None, timeout: float = LEADER_SECONDS) -> None:
    """What all other ranks do: they get the job from rank 0.

    Args:
        fetch_into: puts the prepared data into a folder, on hosts without it; None: it is fetched from its origin.
        timeout: seconds to wait for rank 0, which first has its data come, and prepares the run.

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

    set_name(f"rank {place.rank}")
    pipe, host, shares = arrival
    use_network(host)
    with folder_of(shared if shares else None) as folder:
        job = received(pipe, folder, shares=shares)
        link = WorkerLink(pipe, place.rank, saved=job.checkpoint.step if job.checkpoint else 0)
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

    def __init__(self, pipe: Connection, rank: int, saved: int) -> None:
        self.verdicts: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
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
        self.end(RankError("rank 0 has ended, and its host knows why", recoverable=True))

    def end(self, verdict: BaseException | None) -> None:
        """Has the rank end, and if it does not come back from what it is doing, this process.

        Only what is heard first counts: after the last word the launcher goes.
        """
        if self.heard:
            return
        self.heard = True
        if isinstance(verdict, RankError):
            time.sleep(NOTICE_SECONDS)  # Elastic itself knows more of a worker of its host that was killed
        self.verdicts.put(verdict)
        if verdict is not None and not self.unwinding.wait(UNWIND_SECONDS[self.rank == 0]):
            end_process(verdict)

    def verdict(self) -> BaseException | None:
        """What became of the run; None if that is its completion, or cannot be known."""
        self.unwinding.set()
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
    path = Path(os.environ[ERROR_FILE]).with_suffix(ERROR_SUFFIX)
    with suppress(OSError, pickle.PicklingError, TypeError, AttributeError):
        if not path.exists():
            path.write_bytes(pickle.dumps(error))
