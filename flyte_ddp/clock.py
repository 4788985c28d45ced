"""Where the time goes: seconds by the name of what they were spent on."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up wall-clock seconds; ``with clock("data"): ...`` costs about a microsecond."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Adds the time that the block takes to ``name``."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - begin

    def total(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self.started
