"""A clock for the seconds that named parts of training take, and for the seconds that a GPU waits."""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Batch = TypeVar("Batch")

DATA = ("loading", "data")  # loading: all parts of a batch at once, as for targets' weights; data: each part
WORK = (*DATA, "forward_backward", "communication", "optimizer")  # blocks of a step, not nested
WAITING = ("waiting_data", "waiting_launches")  # what the GPU waits for: batches, and the host's launches
FIRST_SPIN = 5  # the step with the first spins; later spins are in steps 10, 20, 40, ...
SPIN, LONGEST_SPIN = 1.5, 1.0  # a spin's length: factor of the host's seconds in the last block, and limit in seconds
TRIES = 3  # spins for a name without a whole block
CYCLES_PER_SECOND = 2e9  # of a GPU; with 3e9 a spin still lasts as long as the host took


@dataclass
class Activity:
    """Sums over the finished blocks of one name.

    In a ``whole`` block the GPU never waited for the host.
    """

    blocks: int = 0
    spans: float = 0.0  # seconds between the first and last events of blocks
    host: float = 0.0  # seconds that the host spent in the blocks
    whole: int = 0
    whole_spans: float = 0.0
    spins: int = 0
    launch: float = 0.0  # the host's seconds in the newest block (0: the block was whole)

    def busy(self) -> float:
        """Estimate the GPU's busy seconds in all blocks from the whole blocks.

        Without whole blocks returns the seconds of all blocks.
        """
        return min(self.spans, self.blocks * self.whole_spans / self.whole) if self.whole else self.spans


class Clock:
    """Adds up seconds by name. ``with clock("data"): ...`` costs about a microsecond.

    The clock never waits for an event.

    Args:
        event: Makes CUDA events with timing, to count the GPU's busy time (None: the host's time counts).
        spin: Puts the given seconds of idle work into the GPU's queue.
    """

    def __init__(self, event: Callable[[], Any] | None = None, spin: Callable[[float], object] | None = None) -> None:
        self.started = time.perf_counter()
        self.event, self.spin = event, spin
        self.step, self.next_spin = 0, FIRST_SPIN  # of this process
        self.step_seconds = 0.0  # without the first step
        # Blocks that may not be finished: name, first and last event, the host's seconds, and whether the whole block
        # was in the GPU's queue before the GPU began the block.
        self.pending: deque[tuple[str, Any, Any, float, bool]] = deque()
        self._lock = threading.Lock()  # the thread that takes checkpoints reads seconds, too
        self._activities: defaultdict[str, Activity] = defaultdict(Activity)
        self._seconds: defaultdict[str, float] = defaultdict(float)  # of the host, and of earlier processes

    @property
    def seconds(self) -> defaultdict[str, float]:
        """A copy of the seconds by name, in finished blocks.

        On a GPU also has "steps", and the GPU's idle seconds by the names in WAITING.
        """
        seconds = self._seconds.copy()
        if self.event is None:
            return seconds
        with self._lock:
            self._add_finished()
            busy = {name: each.busy() for name, each in self._activities.copy().items()}
            host = {name: self._activities[name].host for name in WORK}
            for name in DATA:
                if not (data := self._activities[name]).whole:
                    busy[name] = max(0.0, data.spans - data.host)  # the host may only have waited in these blocks
        waiting = max(0.0, self.step_seconds - sum(busy.get(name, 0.0) for name in WORK))
        for_data = waiting * sum(map(host.__getitem__, DATA)) / (sum(host.values()) or 1.0)
        busy |= {"steps": self.step_seconds, **dict(zip(WAITING, (for_data, waiting - for_data), strict=True))}
        for name, spent in busy.items():
            seconds[name] += spent
        return seconds

    def add_earlier(self, seconds: dict[str, float], total: float) -> None:
        """Add the ``seconds`` by name and the ``total`` of the run's earlier processes."""
        self._seconds.update(seconds)
        self.started -= total

    def time_steps(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batch of each step, and time the steps.

        On a GPU the first step of a process does not count, because kernels are made in the first step.
        """
        began = time.perf_counter()
        for batch in batches:
            self.step += 1
            yield batch
            if self.step == self.next_spin:
                self.next_spin *= 2
            ended = time.perf_counter()
            self.step_seconds += (ended - began) * (self.step > 1)
            began = ended

    def __call__(self, name: str) -> "Block":
        if self.step == self.next_spin and self.spin is not None:
            sums = self._activities[name]
            if sums.launch and (sums.whole or sums.spins < TRIES):  # the GPU's queue may be shorter than the block
                sums.spins += 1
                self.spin(min(SPIN * sums.launch, LONGEST_SPIN))
        return Block(self, name, self.start_timing(name))

    def start_timing(self, name: str) -> Any:
        """Return the start of a block for ``add_since``.

        The start is the host's time. On a GPU it also has an event in the GPU's queue, except for "evaluation".
        """
        if self.event is None or name == "evaluation":  # evaluation waits for the device anyway
            return time.perf_counter()
        event = self.event()
        event.record()
        return event, time.perf_counter()

    def add_since(self, name: str, begin: Any) -> None:
        if isinstance(begin, float):
            self._seconds[name] += time.perf_counter() - begin
        elif self.step != 1:
            (first, began), (last, ended) = begin, self.start_timing(name)
            self.pending.append((name, first, last, ended - began, not first.query()))
            with self._lock:
                self._add_finished()  # so that the blocks of many steps do not pile up

    def _add_finished(self) -> None:
        while self.pending and self.pending[0][2].query():
            name, first, last, host, whole = self.pending.popleft()
            span, sums = first.elapsed_time(last) / 1000.0, self._activities[name]
            sums.blocks, sums.spans, sums.host = sums.blocks + 1, sums.spans + span, sums.host + host
            sums.whole, sums.whole_spans = sums.whole + whole, sums.whole_spans + whole * span
            sums.launch = 0.0 if whole else host

    def total(self) -> float:
        return time.perf_counter() - self.started


@dataclass(slots=True)
class Block:
    """A started block, as a context manager.

    A context manager of contextlib would take three times as long.
    """

    clock: Clock
    name: str
    begin: Any

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.clock.add_since(self.name, self.begin)


def make_clock(device: torch.device) -> Clock:
    if device.type != "cuda":
        return Clock()
    return Clock(lambda: torch.cuda.Event(enable_timing=True), keep_gpu_busy)  # type: ignore[no-untyped-call]


def keep_gpu_busy(seconds: float) -> None:
    """Put about ``seconds`` of work that computes nothing into the current GPU's queue."""
    torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
