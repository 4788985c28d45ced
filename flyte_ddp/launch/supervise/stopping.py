"""Requests to stop: SIGTERM, which Kubernetes sends before it takes a pod away, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from types import FrameType

from flyte_ddp.errors import StoppedError
from flyte_ddp.process import signal_handlers

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
    try:
        with signal_handlers(dict.fromkeys(numbers, lambda *_: None)):
            yield
    finally:
        signal.set_wakeup_fd(wakeup)
        os.write(writer, OVER)  # as processes that were forked meanwhile keep it open
        thread.join()
        os.close(writer)
        os.close(reader)


def stopped_by(number: signal.Signals, step: int | None) -> BaseException:
    """What ends a run that a signal has asked to stop; the step is that of :class:`StoppedError`."""
    return KeyboardInterrupt() if number == signal.SIGINT else StoppedError(number.name, step)


class StopRequest:
    """What can be waited for, by its ``reader``, until somebody asks to stop."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.reader, self._writer = Pipe(duplex=False)

    def make(self, number: signal.Signals) -> None:
        """Asks to stop, as the signal would."""
        if self.signal is None:
            self.signal = number
            self._writer.send(int(number))

    def error(self, step: int | None) -> BaseException:
        """See :func:`stopped_by`."""
        assert self.signal is not None
        return stopped_by(self.signal, step)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Makes the first of these signals a request; a second Ctrl-C interrupts as usual.

    Outside the main thread, where Python does not let signals be handled, they do what they did.
    """
    stop = StopRequest()

    def handle(number: int, _: FrameType | None) -> None:
        if stop.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.make(signal.Signals(number))

    with signal_handlers(dict.fromkeys(SIGNALS, handle)):
        yield stop
