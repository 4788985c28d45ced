"""Requests to stop: SIGTERM, which Kubernetes sends before it takes a pod away, and Ctrl-C."""

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
OVER = 0  # the number of no signal


@contextmanager
def call_on_signals(numbers: Collection[signal.Signals], function: Callable[[], None]) -> Iterator[None]:
    """Call a function, in a thread, whenever one of these signals comes during the block; nothing else happens then.

    Python runs its own handlers in the main thread, which may sit in a collective operation for long. Outside the main
    thread, where Python lets no handler be set, this must not be used.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        while (number := os.read(reader, 1)[0]) != OVER:
            if number in numbers:  # Python writes the number of each signal that it handles
                function()

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        with signal_handlers(dict.fromkeys(numbers, lambda *_: None)):
            yield
    finally:
        signal.set_wakeup_fd(wakeup)
        os.write(writer, bytes([OVER]))  # closing is not enough: processes that were forked meanwhile keep it open
        thread.join()
        os.close(writer)
        os.close(reader)


def stop_error(number: signal.Signals, step: int | None) -> BaseException:
    """Return the exception for a run that a signal has asked to stop; ``step`` is that of :class:`StoppedError`."""
    return KeyboardInterrupt() if number == signal.SIGINT else StoppedError(number.name, step)


class StopRequest:
    """A request to stop, which may come at any time; its ``reader`` becomes ready by that."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.reader, self._writer = Pipe(duplex=False)

    def make(self, number: signal.Signals) -> None:
        """Ask to stop, as the signal would; only the first call has an effect."""
        if self.signal is None:
            self.signal = number
            self._writer.send(int(number))

    def wait(self) -> bool:
        """Wait for the request or for :meth:`end_waiting`; return whether it was the request."""
        return bool(self.reader.recv() != OVER)

    def end_waiting(self) -> None:
        """Have a thread return from :meth:`wait`."""
        self._writer.send(OVER)

    def error(self, step: int | None) -> BaseException:
        """Return the exception for a run that this has stopped; see :func:`stop_error`."""
        assert self.signal is not None
        return stop_error(self.signal, step)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Make the first SIGTERM or Ctrl-C during the block a request; a second Ctrl-C raises KeyboardInterrupt as usual.

    Outside the main thread, where Python lets no handler be set, signals do what they did before.
    """
    stop = StopRequest()

    def handle(number: int, _: FrameType | None) -> None:
        if stop.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.make(signal.Signals(number))

    with signal_handlers(dict.fromkeys(SIGNALS, handle)):
        yield stop
