"""Supervision of all ranks of a run by the launcher. If a rank fails, the launcher ends all ranks."""

import signal
import time
from collections.abc import Sequence
from multiprocessing import connection

from flyte_ddp.core.errors import RankError, RankLostError, print_to_stderr
from flyte_ddp.core.launch.supervise.failure_report import CONSEQUENCES, Cause
from flyte_ddp.core.launch.supervise.failures import NO_STACK, find_first_failure, find_root_cause
from flyte_ddp.core.launch.supervise.messages import Save, StoreAddress
from flyte_ddp.core.launch.supervise.rank_handle import RankHandle
from flyte_ddp.core.launch.supervise.stopping import StopRequest, stop_error
from flyte_ddp.core.runs.checkpoint import Handover, mark_checkpoint_as_verified
from flyte_ddp.core.runs.run_folder import make_handover
from flyte_ddp.core.runs.work import Work

SETTLE_SECONDS = 0.2  # to wait for reports of other ranks after a root cause is known
LONGEST_SETTLE_SECONDS = 2.0  # to wait for a root cause after failures that look like consequences
SAVE_AFTER_FAILURE_SECONDS = 8.0  # for a checkpoint, because a rank may wait for ever for a lost rank
START_SECONDS = 300.0  # for all ranks to start: importing torch takes long from a network's file system


def supervise_ranks(group: Sequence[RankHandle], stop: StopRequest, work: Work) -> None:
    """Handle the ranks' messages until all ranks have completed.

    Raises the errors of all launchers (:mod:`flyte_ddp.core.launch`), but waits for a checkpoint first. After a failure
    waits up to 8 s for rank 0 to begin the writing, and up to 8 s more for other ranks. A rank that writes gets up to
    ``timeout``. Afterwards waits up to 2 s for the root cause. After a stop waits up to ``save_seconds`` in all.
    ``timeout`` and ``save_seconds`` are settings. Kills no rank.

    Raises:
        RankLostError: A rank has not begun its work within 300 s.
    """
    settings = work.settings
    deadline = time.monotonic() + START_SECONDS
    seconds: float | None = 0.0  # no wait at first, because a failure or a stop may have come while work was sent
    while not all(handle.completed for handle in group):
        wait_and_handle_messages(group, stop, seconds, stop_ends_wait=True)
        if any(handle.failed for handle in group):
            noticed = time.time()
            # First a checkpoint, because rank 0 reports a failure of its code after saving.
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
                f"rank {late.rank} did not start within {START_SECONDS:g} s",
                details=f"its process is at:\n{late.request_stack() or NO_STACK}",
                recoverable=True,
            )


def wait_and_handle_messages(
    group: Sequence[RankHandle], stop: StopRequest, seconds: float | None = None, *, stop_ends_wait: bool = False
) -> None:
    """Wait until a rank sends a message or ends, and handle the messages of all ranks.

    Waits up to ``seconds`` (None: without a limit). If ``stop_ends_wait`` is True, a stop also ends the wait. Messages
    set attributes of the handles. If a rank got SIGTERM, requests a stop in ``stop``. The address of rank 0's store
    is passed on to the other ranks.
    """
    waitables = [waitable for handle in group for waitable in handle.waitables()]
    connection.wait([*waitables, *([stop.reader] if stop_ends_wait else [])], seconds)
    for handle in group:
        handle.poll_exit()  # before its messages are read, because its last messages are then in the pipe
        for message in handle.read_messages():
            if isinstance(message, StoreAddress):  # of the store that rank 0 has opened
                for other in group[1:]:
                    other.send(message)
            else:
                handle.handle_message(message)
        if handle.stop_requested:
            stop.make_request(signal.SIGTERM)
        if handle.exitcode is not None:  # an agent sends the exit code as its rank's last message
            handle.listening = False


def wait_for_root_cause(group: Sequence[RankHandle], stop: StopRequest) -> None:
    """Handle messages until all ranks have failed, for at most 2 s.

    Once a root cause is known, the limit is 0.2 s. Both limits count from the call. A stop does not end the wait, but
    ranks may request a stop in ``stop``.
    """
    begin = time.monotonic()  # the root cause may be reported after its consequences
    while not all(handle.failed for handle in group):
        if time.monotonic() - begin > (SETTLE_SECONDS if find_root_cause(group) else LONGEST_SETTLE_SECONDS):
            break
        wait_and_handle_messages(group, stop, 0.1)


def save_after_failure(group: Sequence[RankHandle], stop: StopRequest, work: Work) -> int | None:
    """Have a rank write a checkpoint, and return its step, or None if no rank answers.

    Rank 0 saves. If rank 0 does not answer, asks the other ranks one after the other, because all ranks have the same
    state. Does not ask other ranks after a failure of a rank's code, or on GPUs while rank 0 lives.

    Waits up to 8 s for rank 0, and up to 8 s for the other ranks together. A rank that is writing gets up to the time
    limit of collective operations. Without any checkpoint, rank 0 answers 0.
    """
    seconds, timeout = SAVE_AFTER_FAILURE_SECONDS, work.settings.timeout
    saver, saved = group[0], request_checkpoint(group, stop, seconds, timeout)
    # While a GPU waits for a lost peer, no rank can copy data from its GPU.
    others = group[1:] if work.world.device_type == "cpu" or not group[0].listening else ()
    deadline = time.monotonic() + seconds
    for handle in others:
        left = deadline - time.monotonic()
        if saved is not None or left <= 0 or any(has_failed_by_code(other) for other in group):
            break
        if handle.has_started() and handle.listening:
            handover = make_handover(work.output_folder)
            saver, saved = handle, await_checkpoint(group, stop, handle, handover, seconds=left, most_seconds=timeout)
    if saved and saver.sees_run_folder:
        mark_checkpoint_as_verified(work.output_folder, saved)
    return saved


def has_failed_by_code(handle: RankHandle) -> bool:
    """Return whether the rank has failed because of its code.

    Then no restart follows, and rank 0 has already saved.
    """
    return handle.report is not None and handle.report.cause not in (*CONSEQUENCES, Cause.MACHINE)


def request_checkpoint(
    group: Sequence[RankHandle], stop: StopRequest, seconds: float, most_seconds: float = 0.0
) -> int | None:
    """Have rank 0 save, and return the newest checkpoint's step.

    Waits for ``seconds``. While the rank writes a checkpoint, waits longer, until ``seconds`` after the last write. The
    whole wait is at most the larger of ``seconds`` and ``most_seconds``. Meanwhile handles all ranks' messages, which
    may request a stop in ``stop``. If rank 0 has not got its work yet, does not wait, and returns the step of the run's
    start.

    Returns:
        The step, 0 without a checkpoint, or None if rank 0 does not answer or has no state to save.
    """
    leader = group[0]
    if not leader.has_started():
        return leader.resumed_step
    return await_checkpoint(group, stop, leader, Save(seconds), seconds=seconds, most_seconds=most_seconds)


def await_checkpoint(
    group: Sequence[RankHandle],
    stop: StopRequest,
    handle: RankHandle,
    request: Save | Handover,
    *,
    seconds: float,
    most_seconds: float,
) -> int | None:
    """Send a rank a request for a checkpoint, and return the step of the answer.

    Waits as :func:`request_checkpoint` does, and meanwhile handles all ranks' messages. If the rank does not answer or
    has no state to save, returns None.
    """
    handle.answered, handle.saved = False, None
    handle.send(request)
    begin = time.monotonic()
    latest = begin + max(seconds, most_seconds)
    while not handle.answered and handle.listening:
        left = min(max(begin, handle.last_write) + seconds, latest) - time.monotonic()
        if left <= 0:
            break
        wait_and_handle_messages(group, stop, left)
    return handle.saved


def print_restart(group: Sequence[RankHandle], work: Work) -> None:
    """Print how long the last restart took, if rank 0 has just reported that the work resumes.

    Prints nothing if progress is off. Clears the handle's ``has_resumed``, so the text is printed once.
    """
    if group[0].has_resumed and work.restarts and work.settings.progress != "off":
        restart = work.restarts[-1]
        print_to_stderr(restart.describe(max(0.0, time.time() - restart.time)))
    group[0].has_resumed = False


def end_ranks(group: Sequence[RankHandle]) -> None:
    """Kill the running ranks, wait up to 10 s for the end of each rank, and close the pipes."""
    for handle in group:
        handle.kill()
    for handle in group:
        handle.close()
