"""A clock for the seconds that named parts of training take."""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Batch = TypeVar("Batch")

DATA = ("loading", "data")  # loading: all parts of a batch at once, as for targets' weights; data: each part
STEPS = "steps"  # clock key: seconds of all steps, on a GPU


class Clock:
    """Adds up seconds by name. ``with clock("data"): ...`` costs about a microsecond.

    On a GPU, a block's seconds are the time between two events in the GPU's queue, and include the GPU's waits for the
    host. The first step of a process compiles and chooses kernels, so its blocks do not count on a GPU.
    The clock never waits for an event.

    Args:
        event: Makes CUDA events with timing (None: the host's time counts).
    """

    def __init__(self, event: Callable[[], Any] | None = None) -> None:
        self.started = time.perf_counter()
        self.event = event
        self.step = 0  # of this process
        self.pending: deque[tuple[str, Any, Any]] = deque()  # name, first and last event of unfinished blocks
        self._lock = threading.Lock()  # the thread that takes checkpoints reads seconds, too
        self._seconds: defaultdict[str, float] = defaultdict(float)  # with those of earlier processes

    @property
    def seconds(self) -> defaultdict[str, float]:
        """Return the seconds of finished blocks by name, as a copy. On a GPU, STEPS has the seconds of all steps."""
        with self._lock:
            self._add_finished()
            return self._seconds.copy()

    def add_earlier_seconds(self, seconds: dict[str, float], total: float) -> None:
        """Add the seconds by name, and the total, of an interrupted run that this process resumes."""
        self._seconds.update(seconds)
        self.started -= total

    def iterate_and_time_steps(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batch of each step and, on a GPU, add up the seconds of the steps as STEPS."""
        began = time.perf_counter()
        for batch in batches:
            self.step += 1
            yield batch
            ended = time.perf_counter()
            if self.event is not None and self.step > 1:
                self._seconds[STEPS] += ended - began
            began = ended

    def __call__(self, name: str) -> "Block":
        return Block(self, name, self.start_timing(name))

    def start_timing(self, name: str) -> Any:
        """Return the start for ``add_seconds_since``: the host's time, or a new event in the GPU's queue."""
        if self.event is None or name == "evaluation":  # evaluation waits for the device anyway
            return time.perf_counter()
        event = self.event()
        event.record()
        return event

    def add_seconds_since(self, name: str, begin: Any) -> None:
        if isinstance(begin, float):
            self._seconds[name] += time.perf_counter() - begin
        elif self.step != 1:
            self.pending.append((name, begin, self.start_timing(name)))
            with self._lock:
                self._add_finished()  # so that the events of many steps do not pile up

    def _add_finished(self) -> None:
        while self.pending and self.pending[0][2].query():
            name, first, last = self.pending.popleft()
            self._seconds[name] += first.elapsed_time(last) / 1000.0

    def total(self) -> float:
        return time.perf_counter() - self.started


@dataclass(slots=True)
class Block:
    """A started block, as a context manager. A context manager of contextlib would take three times as long."""

    clock: Clock
    name: str
    begin: Any

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.clock.add_seconds_since(self.name, self.begin)


def make_clock(device: torch.device) -> Clock:
    if device.type != "cuda":
        return Clock()
    return Clock(lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
