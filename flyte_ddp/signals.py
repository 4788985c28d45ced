"""Signals at moments that suit the work in hand."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def postponed(number: signal.Signals) -> Iterator[None]:
    """Keeps a signal until the end of a short block; only the main thread, which handles it, has something to do."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(number, before)
        if came:
            signal.raise_signal(number)
