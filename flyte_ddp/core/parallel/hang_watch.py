"""Report that this rank waits for other ranks longer than the time limit, wherever the host code is. For GPUs.

NCCL's collectives do not block the host. The host waits later, without a limit, where the device's result is needed.
This is often in code of torch or of a user's model. Therefore a thread watches the collectives, and not the places
where the host waits.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from flyte_ddp.core.errors import CollectiveTimeoutError

POLL_SECONDS = 0.25
_watch: HangWatch | None = None


def start_hang_watch(limit: float, report: Callable[[BaseException], object], new_event: Callable[[], Any]) -> None:
    """Start a daemon thread that calls ``report`` if a collective of this library takes over ``limit`` seconds.

    Reports once, with the stack of the thread that calls this function. Call this function in the rank's main thread. A
    second call replaces the watch. If the device fails, the thread ends without a report.

    Args:
        limit: Seconds that a collective may take.
        report: Called in the daemon thread with a CollectiveTimeoutError.
        new_event: Makes a ``torch.cuda.Event``.
    """
    global _watch  # noqa: PLW0603 (a property of the process, as the process group is)
    _watch = HangWatch(limit, report, new_event)
    threading.Thread(target=_watch.watch_until_overdue, name="hang watch", daemon=True).start()


def in_collective() -> AbstractContextManager[None]:
    """Return a context manager that records its block as a collective, so that the hang watch reports a hang.

    Use each context manager once. Does nothing in a process without a hang watch.
    """
    return nullcontext() if _watch is None else _watch.in_collective()


def watch_async_collective(work: Any) -> None:
    """Let the hang watch watch ``work``, a ``torch.distributed.Work``, until the work is completed. Does not wait.

    The work's tensors are released up to 0.25 s after completion. Does nothing in a process without a hang watch.
    """
    if _watch is not None:
        _watch.entered.append((time.monotonic(), work.is_completed))


class HangWatch:
    """Watches the collectives that this rank has entered.

    ``entered`` has a start time and a function for each collective, oldest first. The function returns whether the
    collective has ended.
    """

    def __init__(self, limit: float, report: Callable[[BaseException], object], new_event: Callable[[], Any]) -> None:
        self.limit, self.report, self.new_event = limit, report, new_event
        self.own_thread = threading.get_ident()
        self.entered: deque[tuple[float, Callable[[], bool]]] = deque()

    @contextmanager
    def in_collective(self) -> Iterator[None]:
        """Record the block as a collective.

        The collective ends when host and device have finished the block, or at once if the block raises an exception.
        """
        event: Any = None
        left = False
        self.entered.append((time.monotonic(), lambda: left and (event is None or event.query())))
        try:
            yield
            event = self.new_event()
            event.record()  # in the device's queue behind the collective
        finally:
            left = True

    def has_overdue_collective(self) -> bool:
        """Return whether the oldest unfinished collective is overdue. Removes finished collectives from ``entered``."""
        while self.entered and self.entered[0][1]():
            self.entered.popleft()
        return bool(self.entered) and time.monotonic() - self.entered[0][0] > self.limit

    def watch_until_overdue(self) -> None:
        """Wait until a collective is overdue, then call ``report`` with an error that has the main thread's stack.

        If the device fails, returns without a report.
        """
        try:
            while not self.has_overdue_collective():
                time.sleep(POLL_SECONDS)
        except RuntimeError:  # the device has failed, and the rank's main thread gets that failure, too
            return
        error = CollectiveTimeoutError(f"the GPU waited for other ranks for {self.limit:g} s")
        if (frame := sys._current_frames().get(self.own_thread)) is not None:
            error.add_note("".join(["The stack of this rank:\n", *traceback.format_stack(frame)]))
        self.report(error)
