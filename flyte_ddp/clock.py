"""A clock that adds up, by name, the seconds that parts of training take, also on GPUs."""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Clock:
    """Adds up seconds by name; ``with clock("data"): ...`` costs about a microsecond.

    If ``event`` makes CUDA events with timing, the GPU's time counts: host work beside the GPU counts nothing, and idle
    time of the GPU in full. The clock never waits for an event. Without ``event`` the host's time counts.
    """

    def __init__(self, event: Callable[[], Any] | None = None) -> None:
        self.started = time.perf_counter()
        self.event = event
        self.pending: deque[tuple[str, Any, Any]] = deque()  # name, first and last event of blocks not known as done
        self._lock = threading.Lock()  # the thread that takes checkpoints reads seconds, too
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @property
    def seconds(self) -> defaultdict[str, float]:
        """The clock's own dict of seconds by name, of finished blocks only."""
        with self._lock:
            while self.pending and self.pending[0][2].query():
                name, begin, end = self.pending.popleft()
                self._seconds[name] += begin.elapsed_time(end) / 1000.0
        return self._seconds

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = self.start_timing(name)
        try:
            yield
        finally:
            self.add_since(name, begin)

    def start_timing(self, name: str) -> Any:
        """Return for ``add_since`` an event in the GPU's queue, or the host's time."""
        if self.event is None or name == "evaluation":  # evaluation waits for the device anyway
            return time.perf_counter()
        event = self.event()
        event.record()
        return event

    def add_since(self, name: str, begin: Any) -> None:
        if isinstance(begin, float):
            self._seconds[name] += time.perf_counter() - begin
        else:
            self.pending.append((name, begin, self.start_timing(name)))
            _ = self.seconds  # takes finished events out, so that those of many steps do not pile up

    def total(self) -> float:
        return time.perf_counter() - self.started


def make_clock(device: torch.device) -> Clock:
    on_gpu = device.type == "cuda"
    return Clock(lambda: torch.cuda.Event(enable_timing=True)) if on_gpu else Clock()  # type: ignore[no-untyped-call]
