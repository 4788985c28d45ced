"""Where the time goes: seconds by the name of what they were spent on."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Clock:
    """Adds up seconds by name; ``with clock("data"): ...`` costs about a microsecond.

    A GPU, to which the host hands work without waiting until it is done, has a clock of its own: events between the
    pieces of that work. Nothing waits for events: they are looked at when later ones come. So what the host does while
    the GPU is at work counts for nothing, and what the GPU waits for counts in full.
    """

    def __init__(self, event: Callable[[], Any] | None = None) -> None:
        """``event``: for a GPU, makes one with the methods of ``torch.cuda.Event``."""
        self.started = time.perf_counter()
        self.event = event
        self.pending: deque[tuple[str, Any, Any]] = deque()
        self._lock = threading.Lock()  # checkpoints are taken by other threads
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @property
    def seconds(self) -> defaultdict[str, float]:
        """Seconds by name, of all that the device has done by now."""
        with self._lock:
            while self.pending and self.pending[0][2].query():
                name, begin, end = self.pending.popleft()
                self._seconds[name] += begin.elapsed_time(end) / 1000.0
        return self._seconds

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time that the block takes to ``name``."""
        begin = self.mark(name)
        try:
            yield
        finally:
            self.add(name, begin)

    def mark(self, name: str) -> Any:
        """Return this moment, for :meth:`add`."""
        if self.event is None or name == "evaluation":  # which waits for the device itself
            return time.perf_counter()
        event = self.event()
        event.record()
        return event

    def add(self, name: str, begin: Any) -> None:
        """Add to ``name`` the time since ``begin``, which :meth:`mark` has returned for that name."""
        if isinstance(begin, float):
            self._seconds[name] += time.perf_counter() - begin
        else:
            self.pending.append((name, begin, self.mark(name)))
            _ = self.seconds  # so that the events of many steps do not pile up

    def total(self) -> float:
        """Return the seconds since the clock was made."""
        return time.perf_counter() - self.started


def clock_for(device: torch.device) -> Clock:
    """Return a clock that knows when work on this device is done."""
    if device.type != "cuda":
        return Clock()
    import torch

    return Clock(lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
