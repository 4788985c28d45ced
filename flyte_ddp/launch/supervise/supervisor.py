"""Supervision of a worker group: its launcher listens to all ranks, and ends all of them when one has failed."""

import signal
import time
from collections.abc import Sequence
from multiprocessing import connection
from typing import Any

from flyte_ddp.errors import RankError, RankLostError, print_to_stderr
from flyte_ddp.launch.supervise.failures import NO_STACK, find_first_failure, find_root_cause
from flyte_ddp.launch.supervise.link import CONSEQUENCES
from flyte_ddp.launch.supervise.rank_handle import RankHandle
from flyte_ddp.launch.supervise.stopping import StopRequest, stop_error
from flyte_ddp.runs.checkpoint import describe_handover, trust_checkpoint
from flyte_ddp.runs.work import Work

SETTLE_SECONDS = 0.2  # to wait for reports of other ranks after a failure that is a root cause
LONGEST_SETTLE_SECONDS = 2.0  # to wait for a root cause after failures that look like consequences of another one
SAVE_AFTER_FAILURE_SECONDS = 8.0  # for a checkpoint, when a rank may wait for another that is gone for ever
START_SECONDS = 300.0  # for all ranks to start: importing torch takes long from a network's file system


def supervise_ranks(group: Sequence[RankHandle], stop: StopRequest, work: Work) -> None:
    """Handle the ranks' messages until all ranks have completed; raise the launchers' errors, and kill no rank.

    Before it raises, waits for a checkpoint: after a failure up to 8 s until a rank writes one, and until it is written
    within ``timeout``; after a stop up to ``save_seconds`` in all. Both are settings.
    """
    settings = work.settings
    deadline = time.monotonic() + START_SECONDS
    seconds: float | None = 0.0  # no wait at first: a failure or a stop may have come while work was sent
    while not all(handle.completed for handle in group):
        wait_and_handle_messages(group, stop, seconds, stop_ends_wait=True)
        if any(handle.failed for handle in group):
            noticed = time.time()
            # A checkpoint first: rank 0 reports a failure of its own after it has saved.
            saved = save_after_failure(group, stop, work)
            wait_for_root_cause(group, stop)
            failure = find_first_failure(group, settings.timeout)
            if isinstance(failure, RankError):
                failure.step, failure.noticed = saved, noticed
            raise failure
        if stop.signal is not None:
            raise stop_error(stop.signal, request_checkpoint(group, stop, settings.save_seconds))
        print_restart(group, work)
        late = next((handle for handle in group if not handle.has_started()), None)
        seconds = max(0.0, deadline - time.monotonic()) if late else None
        if late and seconds == 0.0:
            raise RankLostError(
                f"rank {late.rank} did not begin within {START_SECONDS:g} s",
                details=f"its process is at:\n{late.read_stack() or NO_STACK}",
                recoverable=True,
            )


def wait_and_handle_messages(
    group: Sequence[RankHandle], stop: StopRequest, seconds: float | None = None, *, stop_ends_wait: bool = False
) -> None:
    """Wait up to ``seconds`` for a rank to send or end (``stop_ends_wait``: or for a stop), and handle the messages."""
    waitables = [waitable for handle in group for waitable in handle.waitables()]
    connection.wait([*waitables, *([stop.reader] if stop_ends_wait else [])], seconds)
    for handle in group:
        handle.poll_exit()  # before its messages are read: what it sent before its end is then in the pipe
        for message in handle.read_messages():
            if message["kind"] == "port":  # of the store that rank 0 has opened
                for other in group[1:]:
                    other.send("address", host=handle.host, port=message["port"])
            else:
                handle.handle_message(message)
        if handle.stop_requested:
            stop.make_request(signal.SIGTERM)
        if handle.exitcode is not None:  # an agent sends it as the last message of its rank
            handle.listening = False


def wait_for_root_cause(group: Sequence[RankHandle], stop: StopRequest) -> None:
    """Handle messages until all ranks have failed, for 0.2 s after a root cause is known, or for 2 s without one."""
    begin = time.monotonic()  # the root cause may be reported after its consequences
    while not all(handle.failed for handle in group):
        if time.monotonic() - begin > (SETTLE_SECONDS if find_root_cause(group) else LONGEST_SETTLE_SECONDS):
            break
        wait_and_handle_messages(group, stop, 0.1)


def save_after_failure(group: Sequence[RankHandle], stop: StopRequest, work: Work) -> int | None:
    """Have rank 0 save, or without rank 0 the lowest rank that lives; return the step, None if no rank answers.

    All ranks of a training have the same state. Waits up to 8 s for rank 0, and as long for the others. A rank that
    writes gets the time that the settings give to a collective operation.
    """
    seconds, timeout = SAVE_AFTER_FAILURE_SECONDS, work.settings.timeout
    saver, saved = group[0], request_checkpoint(group, stop, seconds, timeout)
    # A GPU that waits for a lost peer copies nothing, on no rank.
    others = group[1:] if work.world.device_type == "cpu" or not group[0].listening else ()
    deadline = time.monotonic() + seconds
    for handle in others:
        left = deadline - time.monotonic()
        if saved is not None or left <= 0 or any(is_of_code(other) for other in group):
            break
        if handle.has_started() and handle.listening:
            handover = describe_handover(work.output_folder)
            limits = {"seconds": left, "most_seconds": timeout}
            saver, saved = handle, await_saved(group, stop, handle, "stand_in", handover=handover, **limits)
    if saved and saver.sees_run_folder:
        trust_checkpoint(work.output_folder, saved)
    return saved


def is_of_code(handle: RankHandle) -> bool:
    """Return whether the rank has failed by its code: then no restart follows, and rank 0 has saved by itself."""
    return handle.error is not None and handle.error["cause"] not in (*CONSEQUENCES, "machine")


def request_checkpoint(
    group: Sequence[RankHandle], stop: StopRequest, seconds: float, most_seconds: float = 0.0
) -> int | None:
    """Have rank 0 save; return the newest checkpoint's step: 0 without one, None for no answer (await_saved)."""
    leader = group[0]
    if not leader.has_started():
        return leader.resumed_step
    return await_saved(group, stop, leader, "save", seconds=seconds, most_seconds=most_seconds)


def await_saved(
    group: Sequence[RankHandle],
    stop: StopRequest,
    handle: RankHandle,
    request: str,
    *,
    seconds: float,
    most_seconds: float,
    **values: Any,
) -> int | None:
    """Send a rank the request "save" or "stand_in", and return the step that it answers; None for no answer.

    Waits up to ``seconds``, and up to ``most_seconds`` while the rank writes a checkpoint.
    """
    handle.answered, handle.saved = False, None
    handle.send(request, seconds=seconds, **values)
    begin = time.monotonic()
    latest = begin + max(seconds, most_seconds)
    while not handle.answered and handle.listening:
        left = min(max(begin, handle.last_write) + seconds, latest) - time.monotonic()
        if left <= 0:
            break
        wait_and_handle_messages(group, stop, left)
    return handle.saved


def print_restart(group: Sequence[RankHandle], work: Work) -> None:
    """Print once how long a restart took, when rank 0 says that the work goes on."""
    if group[0].goes_on and work.restarts and work.settings.progress != "off":
        restart = work.restarts[-1]
        print_to_stderr(restart.describe(max(0.0, time.time() - restart.time)))
    group[0].goes_on = False


def end_ranks(group: Sequence[RankHandle]) -> None:
    """Kill the ranks that still run, wait up to 10 s for the end of each, and close their pipes."""
    for handle in group:
        handle.kill()
    for handle in group:
        handle.close()
