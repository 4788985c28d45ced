"""A clock that adds up, by name, the seconds that parts of training take, also on GPUs."""

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

    On a GPU the time is the GPU's: events are recorded in its queue before and after the work of a block. The clock
    never waits for an event: it asks whether earlier events are done when later ones are recorded. So time in which
    the host works beside the GPU counts nothing, and time in which the GPU is idle counts in full.
    """

    def __init__(self, event: Callable[[], Any] | None = None) -> None:
        """Start the clock. ``event`` makes a ``torch.cuda.Event`` with timing; None: the time of the host counts."""
        self.started = time.perf_counter()
        self.event = event
        self.pending: deque[tuple[str, Any, Any]] = deque()
        self._lock = threading.Lock()  # the thread that takes checkpoints reads seconds, too
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @property
    def seconds(self) -> defaultdict[str, float]:
        """The seconds of each name, without work that the device has not finished yet."""
        with self._lock:
            while self.pending and self.pending[0][2].query():
                name, begin, end = self.pending.popleft()
                self._seconds[name] += begin.elapsed_time(end) / 1000.0
        return self._seconds

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the seconds that the block takes to those of ``name``."""
        begin = self.start_timing(name)
        try:
            yield
        finally:
            self.add_since(name, begin)

    def start_timing(self, name: str) -> Any:
        """Return the present time for :meth:`add_since`: the host's, or an event that is recorded in the GPU's queue."""
        if self.event is None or name == "evaluation":  # evaluation waits for the device anyway
            return time.perf_counter()
        event = self.event()
        event.record()
        return event

    def add_since(self, name: str, begin: Any) -> None:
        """Add the seconds since ``begin``, which ``mark(name)`` returned, to those of ``name``."""
        if isinstance(begin, float):
            self._seconds[name] += time.perf_counter() - begin
        else:
            self.pending.append((name, begin, self.start_timing(name)))
            _ = self.seconds  # takes finished events out, so that those of many steps do not pile up

    def total(self) -> float:
        """Return the seconds since this clock was made, by the host's time."""
        return time.perf_counter() - self.started


def clock_for(device: torch.device) -> Clock:
    """Return a clock for work on this device: by events on CUDA devices, else by the host's time."""
    if device.type != "cuda":
        return Clock()
    import torch

    return Clock(lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
