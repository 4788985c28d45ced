"""A launcher listens to its worker group, and ends all of it when one rank has failed."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from flyte_ddp import results
from flyte_ddp.launch.supervise import handed_in
from flyte_ddp.launch.supervise.failures import cause_is_known, did_not_begin, first_failure
from flyte_ddp.launch.supervise.rank_handle import RankHandle
from flyte_ddp.launch.supervise.stopping import StopRequest

if TYPE_CHECKING:
    from flyte_ddp.runs.job import Job

SETTLE_SECONDS = 0.2  # from the first failure on
LONGEST_SETTLE_SECONDS = 2.0  # the same, as long as nothing but consequences is known
SAVE_SECONDS = 8.0  # for a checkpoint after a failure, where rank 0 may wait for a rank that is gone for ever
BEGIN_SECONDS = 300.0  # for an import of torch, which a network's file system draws out


def watch(group: Sequence[RankHandle], stop: StopRequest, job: Job) -> None:
    """Returns when all ranks have completed; raises when one has failed, or the run is to stop."""
    deadline = time.monotonic() + BEGIN_SECONDS
    while not all(handle.completed for handle in group):
        late = next((handle for handle in group if not handle.has_begun()), None)
        listen(group, stop, max(0.0, deadline - time.monotonic()) if late else None)
        if any(handle.failed() for handle in group):
            save(group, stop, SAVE_SECONDS)  # first, as rank 0 reports a failure of its own after it has saved
            settle(group, stop)
            raise first_failure(group, job.settings.timeout)
        if stop.signal is not None:
            raise stop.error(save(group, stop, job.settings.save_seconds))
        if late and not late.has_begun() and time.monotonic() >= deadline:
            raise did_not_begin(late, BEGIN_SECONDS)


def listen(group: Sequence[RankHandle], stop: StopRequest, seconds: float | None = None) -> None:
    """Waits for a message or the end of a rank, or for a request to stop, and takes the messages in."""
    waitables = [waitable for handle in group for waitable in handle.waitables()]
    connection.wait([*waitables, *([] if stop.signal else [stop.reader])], seconds)
    for handle in group:
        handle.has_ended()  # looked for first: what it sent before is then in the pipe
        for message in handle.messages():
            take_in(message, handle, group, stop)
        if handle.exitcode is not None:  # which of a rank on another host is its last message
            handle.listening = False


def take_in(message: dict[str, Any], handle: RankHandle, group: Sequence[RankHandle], stop: StopRequest) -> None:
    """Takes in what one of the ranks has sent."""
    kind = message["kind"]
    if kind == "error":
        handle.error = {**message, "time": message["time"] + handle.clock_behind}
    elif kind == "completed":
        handle.completed = True
    elif kind == "saved":
        handle.saved = message["step"]
    elif kind == "stop":
        stop.make(signal.SIGTERM)
    elif kind == "port":
        for other in group[1:]:
            other.send("address", host=handle.host, port=message["port"])
    elif kind in results.KINDS and handle.inbox is not None:
        handle.inbox.put(message)


def settle(group: Sequence[RankHandle], stop: StopRequest) -> None:
    """Listens for what came first: it may show itself later than its consequences."""
    begin = time.monotonic()
    while not all(handle.failed() for handle in group):
        if time.monotonic() - begin > (SETTLE_SECONDS if cause_is_known(group) else LONGEST_SETTLE_SECONDS):
            break
        listen(group, stop, 0.1)


def save(group: Sequence[RankHandle], stop: StopRequest, seconds: float) -> int | None:
    """Have rank 0 write a checkpoint, and wait for it.

    Args:
        seconds: to wait at most.

    Returns:
        The step of the newest checkpoint, 0 if there is none, None if rank 0 did not say so in time.
    """
    leader = group[0]
    if not leader.has_begun():
        return leader.resumes_after
    leader.saved = None
    leader.send("save")
    deadline = time.monotonic() + seconds
    while leader.saved is None and leader.listening and (left := deadline - time.monotonic()) > 0:
        listen(group, stop, left)
    return leader.saved


def end(group: Sequence[RankHandle]) -> None:
    """Kill the ranks that still run, close their connections, and write what failed or stopped ranks have handed in.

    Waits for that writing as :func:`handed_in.close` says; a rank that has completed has waited for its own.
    """
    for handle in group:
        handle.kill()
    for handle in group:
        handle.close()
    handed_in.close(handle.inbox for handle in group if handle.inbox is not None)
