"""Requests to stop: SIGTERM, which Kubernetes sends before it takes a pod away, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from types import FrameType, TracebackType
from typing import Any, Self

from flyte_ddp.errors import StoppedError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
OVER = b"\0"  # the number of no signal


@contextmanager
def handed_on(numbers: Collection[signal.Signals], tell: Callable[[], None]) -> Iterator[None]:
    """Calls ``tell`` when one of these signals comes, whatever the main thread is doing; nothing else happens then.

    Python's own handlers wait for the main thread, which may sit in a collective for long; a thread that reads from
    the wake-up file does not.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def hand_on() -> None:
        while (byte := os.read(reader, 1)) != OVER:
            if byte[0] in numbers:  # a byte comes for every signal that Python handles
                tell()

    thread = threading.Thread(target=hand_on, name="signals", daemon=True)
    thread.start()
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.write(writer, OVER)  # as processes that were forked meanwhile keep it open
        thread.join()
        os.close(writer)
        os.close(reader)


def stopped_by(number: signal.Signals, step: int | None) -> BaseException:
    """What ends a run that a signal has asked to stop.

    Args:
        step: of the newest checkpoint; 0 without any, None if that is not known.
    """
    return KeyboardInterrupt() if number == signal.SIGINT else StoppedError(number.name, step)


class StopRequest:
    """Turns the first of these signals into something that can be waited for; a second Ctrl-C interrupts as usual.

    A context manager. Outside the main thread, where Python does not let signals be handled, they do what they did.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.reader, self._writer = Pipe(duplex=False)
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def make(self, number: signal.Signals) -> None:
        """Asks to stop, as the signal would."""
        if self.signal is None:
            self.signal = number
            self._writer.send(int(number))

    def error(self, step: int | None) -> BaseException:
        """See :func:`stopped_by`."""
        assert self.signal is not None
        return stopped_by(self.signal, step)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.make(signal.Signals(number))
