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

HOST_ONLY = ("evaluation",)  # ends by waiting for the device, and is asked for at once


class Clock:
    """Adds up wall-clock seconds; ``with clock("data"): ...`` costs about a microsecond."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @property
    def seconds(self) -> defaultdict[str, float]:
        """By name, as far as they are known."""
        return self._seconds

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Adds the time that the block takes to ``name``."""
        begin = self.mark(name)
        try:
            yield
        finally:
            self.add(name, begin)

    def mark(self, name: str) -> Any:  # noqa: ARG002 (another clock's marks depend on it)
        """This moment, for :meth:`add`."""
        return time.perf_counter()

    def add(self, name: str, begin: Any) -> None:
        """Adds the time since a mark of that name."""
        self._seconds[name] += time.perf_counter() - begin

    def total(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self.started


class DeviceClock(Clock):
    """The same by the clock of a GPU, to which the host hands work without waiting until it is done.

    A mark is an event between pieces of that work. Nothing waits for events: they are looked at when later ones come.
    So what the host does while the GPU is at work counts for nothing, and what the GPU waits for counts in full.

    Args:
        event: makes one, with ``record``, ``query`` and ``elapsed_time`` (in milliseconds) as ``torch.cuda.Event``.
    """

    def __init__(self, event: Callable[[], Any]) -> None:
        super().__init__()
        self.event = event
        self.pending: deque[tuple[str, Any, Any]] = deque()
        self.looking = threading.Lock()  # checkpoints are taken by other threads

    @property
    def seconds(self) -> defaultdict[str, float]:
        """By name, of all that the device has done by now."""
        with self.looking:
            while self.pending and self.pending[0][2].query():
                name, begin, end = self.pending.popleft()
                self._seconds[name] += begin.elapsed_time(end) / 1000.0
        return self._seconds

    def mark(self, name: str) -> Any:
        """See :class:`Clock`."""
        if name in HOST_ONLY:
            return super().mark(name)
        event = self.event()
        event.record()
        return event

    def add(self, name: str, begin: Any) -> None:
        """See :class:`Clock`."""
        if name in HOST_ONLY:
            super().add(name, begin)
            return
        self.pending.append((name, begin, self.mark(name)))
        _ = self.seconds  # so that the events of many steps do not pile up


def clock_for(device: torch.device) -> Clock:
    """The one that knows when work on this device is done."""
    if device.type != "cuda":
        return Clock()
    import torch

    return DeviceClock(lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
