"""Time limits for user code that may never return, such as a read from a dead file server."""

import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from flyte_ddp.core.errors import MachineError
from flyte_ddp.core.machine.process import undone_in_forks, use_signal_handlers

limit_seconds = 600.0  # FLYTE_DDP_TIMEOUT, once a launcher or a rank has set it


@dataclass
class Wait:
    """A block with a time limit."""

    what: str
    start: float  # by time.monotonic()


waits: list[Wait] = []  # of this process, limited by the timer; the innermost is the last


@contextmanager
def limit_wait(what: str) -> Iterator[None]:
    """Raise a MachineError in the block if the block takes longer than ``limit_seconds``. The error has the stack.

    ``what`` names the awaited thing at the start of the error. If code in the block catches the error, the error is
    raised again after the same time. A nested block has a separate limit, and then the limit of the outer block begins
    again.

    Uses the system timer and the signal SIGALRM. Has no effect outside the main thread, in C code that never returns,
    and if other code uses the timer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
    elif waits:
        waits.append(Wait(what, time.monotonic()))
        if not signal.getitimer(signal.ITIMER_REAL)[0] and signal.getsignal(signal.SIGALRM) is raise_if_over_time_limit:
            # Code within the outer block has used the timer.
            signal.setitimer(signal.ITIMER_REAL, limit_seconds, limit_seconds)
        try:
            yield
        finally:
            del waits[-1:]
            if waits:  # else this is a fork
                waits[-1].start = time.monotonic()
    elif signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
    else:
        waits.append(Wait(what, time.monotonic()))
        with undone_in_forks(waits.clear), use_signal_handlers({signal.SIGALRM: raise_if_over_time_limit}):
            signal.setitimer(signal.ITIMER_REAL, limit_seconds, limit_seconds)  # again, if code catches the error
            try:
                yield
            finally:
                waits.clear()
                signal.setitimer(signal.ITIMER_REAL, 0)


def raise_if_over_time_limit(_: int, frame: FrameType | None) -> None:
    """Raise a MachineError if the innermost block has taken too long, else set the timer again. Handles SIGALRM."""
    if not waits:  # the wait has ended
        return
    wait = waits[-1]
    left = wait.start + limit_seconds - time.monotonic()
    if left <= 0:
        raise make_late_error(wait.what, "".join(traceback.format_stack(frame)))
    signal.setitimer(signal.ITIMER_REAL, left, limit_seconds)


def make_late_error(what: str, stack: str) -> MachineError:
    error = MachineError(f"{what} was not ready within {limit_seconds:g} s (FLYTE_DDP_TIMEOUT)")
    error.add_note(f"It is at:\n{stack}")
    return error
