"""Notices that this rank waits for others longer than the time limit, wherever its host is meanwhile. For GPUs.

NCCL's collectives do not block the host. The host waits later, and without a limit, where it needs the device: for a
number, a copy of ordinary memory, room in the device's queue. Much of that is code of torch or of a user's model. So a
thread watches the collectives, and not the places where the host may wait.
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

from flyte_ddp.errors import CollectiveTimeoutError

POLL_SECONDS = 0.25
_watch: HangWatch | None = None


def watch_collectives(limit: float, report: Callable[[BaseException], object], new_event: Callable[[], Any]) -> None:
    """Start a thread that watches the collectives of this process, to its end; the calling thread is the rank's own.

    Args:
        limit: seconds that a collective may take.
        report: is called in that thread, once, with a CollectiveTimeoutError when a collective takes longer.
        new_event: returns an object with the methods of ``torch.cuda.Event``.
    """
    global _watch  # noqa: PLW0603 (a property of the process, as the process group is)
    _watch = HangWatch(limit, report, new_event)
    threading.Thread(target=_watch.watch, name="hang watch", daemon=True).start()


def in_collective() -> AbstractContextManager[None]:
    """Return what goes around a collective, or several; it does nothing if this process does not watch them."""
    return nullcontext() if _watch is None else _watch.in_collective()


def watch_work(work: Any) -> None:
    """Have a collective that goes on in the background (``torch.distributed.Work``) watched, if this process does.

    Its tensors stay in memory for up to POLL_SECONDS after it has ended.
    """
    if _watch is not None:
        _watch.entered.append((time.monotonic(), work.is_completed))


class HangWatch:
    """The collectives that this rank has entered, the oldest first: when, and what tells whether it has ended."""

    def __init__(self, limit: float, report: Callable[[BaseException], object], new_event: Callable[[], Any]) -> None:
        self.limit, self.report, self.new_event = limit, report, new_event
        self.own_thread = threading.get_ident()
        self.entered: deque[tuple[float, Callable[[], bool]]] = deque()

    @contextmanager
    def in_collective(self) -> Iterator[None]:
        """Go around a collective. It has ended when the host has left the block and the device has done its part."""
        event: Any = None
        left = False

        def has_ended() -> bool:
            return left and (event is None or event.query())

        self.entered.append((time.monotonic(), has_ended))
        try:
            yield
            event = self.new_event()
            event.record()
        finally:
            left = True

    def is_overdue(self) -> bool:
        """Forget the oldest collectives that have ended; return whether the next one takes longer than the limit."""
        while self.entered and self.entered[0][1]():
            self.entered.popleft()
        return bool(self.entered) and time.monotonic() - self.entered[0][0] > self.limit

    def watch(self) -> None:
        """Look every POLL_SECONDS until a collective is overdue, and report that, with the stack of the rank's thread.

        Returns without a report if the device has failed, which the rank's own thread meets as well.
        """
        try:
            while not self.is_overdue():
                time.sleep(POLL_SECONDS)
        except RuntimeError:
            return
        error = CollectiveTimeoutError(f"the GPU waited for other ranks for {self.limit:g} s")
        if (frame := sys._current_frames().get(self.own_thread)) is not None:
            error.add_note("".join(["Its host was at:\n", *traceback.format_stack(frame)]))
        self.report(error)
