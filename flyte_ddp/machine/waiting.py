"""A limit of this process for waits for user code that may never return, such as a read from a dead file server."""

import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from flyte_ddp.errors import MachineError
from flyte_ddp.machine.process import signal_handlers

limit_seconds = 600.0  # FLYTE_DDP_TIMEOUT, where a launcher or a rank has set it


@contextmanager
def limit_wait(what: str) -> Iterator[None]:
    """Raise a MachineError with ``what`` and the stack if the block takes longer than ``limit_seconds``.

    Has no limit outside the main thread, where a system timer (SIGALRM) runs already, and in C code that never returns.
    """

    def raise_late(_: int, frame: FrameType | None) -> NoReturn:
        raise late_error(what, "".join(traceback.format_stack(frame)))

    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return
    with signal_handlers({signal.SIGALRM: raise_late}):
        signal.setitimer(signal.ITIMER_REAL, limit_seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def late_error(what: str, stack: str) -> MachineError:
    error = MachineError(f"{what} has not come within {limit_seconds:g} s (FLYTE_DDP_TIMEOUT)")
    error.add_note(f"It is at:\n{stack}")
    return error
