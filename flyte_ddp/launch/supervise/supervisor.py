"""Supervision of a worker group: its launcher listens to all ranks, and ends all of them when one has failed."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from flyte_ddp.launch.supervise.failures import did_not_begin, first_failure, root_cause_is_known
from flyte_ddp.launch.supervise.rank_handle import RankHandle
from flyte_ddp.launch.supervise.stopping import StopRequest

if TYPE_CHECKING:
    from flyte_ddp.runs.job import Job

SETTLE_SECONDS = 0.2  # from the first failure on
LONGEST_SETTLE_SECONDS = 2.0  # the same, as long as every known failure looks like a consequence of another one
SAVE_SECONDS = 8.0  # for a checkpoint after a failure, when rank 0 may wait for a rank that is gone for ever
BEGIN_SECONDS = 300.0  # for an import of torch, which takes long from a network's file system


def watch(group: Sequence[RankHandle], stop: StopRequest, job: Job) -> None:
    """Return when all ranks have completed. Before it raises, have rank 0 write a checkpoint.

    Raises:
        UserError, RankError: see :func:`first_failure`.
        StoppedError, KeyboardInterrupt: this process or a rank was told to stop.
    """
    deadline = time.monotonic() + BEGIN_SECONDS
    while not all(handle.completed for handle in group):
        late = next((handle for handle in group if not handle.has_begun()), None)
        listen(group, stop, max(0.0, deadline - time.monotonic()) if late else None)
        if any(handle.failed() for handle in group):
            # A checkpoint first: rank 0 reports a failure of its own after it has saved.
            request_checkpoint(group, stop, SAVE_SECONDS)
            wait_for_root_cause(group, stop)
            raise first_failure(group, job.settings.timeout)
        if stop.signal is not None:
            raise stop.error(request_checkpoint(group, stop, job.settings.save_seconds))
        if late and not late.has_begun() and time.monotonic() >= deadline:
            raise did_not_begin(late, BEGIN_SECONDS)


def listen(group: Sequence[RankHandle], stop: StopRequest, seconds: float | None = None) -> None:
    """Wait for a message or the end of a rank, or for a request to stop; take in all messages that have come."""
    waitables = [waitable for handle in group for waitable in handle.waitables()]
    connection.wait([*waitables, *([] if stop.signal else [stop.reader])], seconds)
    for handle in group:
        handle.has_ended()  # before its messages are read: what it sent before its end is then in the pipe
        for message in handle.messages():
            handle_message(message, handle, group, stop)
        if handle.exitcode is not None:  # an agent sends it as the last message of its rank
            handle.listening = False


def handle_message(message: dict[str, Any], handle: RankHandle, group: Sequence[RankHandle], stop: StopRequest) -> None:
    """Take in a message of one of the ranks."""
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


def wait_for_root_cause(group: Sequence[RankHandle], stop: StopRequest) -> None:
    """Listen for a moment after the first known failure, as the root cause may show itself after its consequences."""
    begin = time.monotonic()
    while not all(handle.failed() for handle in group):
        if time.monotonic() - begin > (SETTLE_SECONDS if root_cause_is_known(group) else LONGEST_SETTLE_SECONDS):
            break
        listen(group, stop, 0.1)


def request_checkpoint(group: Sequence[RankHandle], stop: StopRequest, seconds: float) -> int | None:
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
    """Kill the ranks that still run, and close their connections."""
    for handle in group:
        handle.kill()
    for handle in group:
        handle.close()
