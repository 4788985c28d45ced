"""Requests to stop: SIGTERM, which Kubernetes sends before it takes a pod away, Ctrl-C, and a closed terminal."""

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from types import FrameType

from flyte_ddp.errors import StoppedError
from flyte_ddp.machine.process import signal_handlers, stop_signals, undone_in_forks

OVER = 0  # no signal has this number: it ends a thread that waits for numbers of signals


@contextmanager
def call_on_signals(numbers: Collection[signal.Signals], function: Callable[[], None]) -> Iterator[None]:
    """Call a function in a thread whenever one of these signals comes in the block; the signal has no other effect.

    Enter the block in the main thread, which may sit in a collective operation for minutes.
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
        with (
            signal_handlers(dict.fromkeys(numbers, lambda *_: None)),
            undone_in_forks(lambda: signal.set_wakeup_fd(wakeup)),
        ):
            yield
    finally:
        signal.set_wakeup_fd(wakeup)
        os.write(writer, bytes([OVER]))  # closing is not enough: processes that were forked meanwhile keep it open
        thread.join()
        os.close(writer)
        os.close(reader)


class StopRequest:
    """A request to stop. ``signal`` is None until the request; then ``reader`` is ready for ``connection.wait``."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.reader, self._writer = Pipe(duplex=False)

    def make_request(self, number: signal.Signals) -> None:
        """Request a stop as if this signal had come. Only the first call has an effect."""
        if self.signal is None:
            self.signal = number
            # Not send(): an exception may rise in here, and CPython 3.12.1 crashes when it collects send()'s buffer.
            self._writer.send_bytes(bytes([number]))

    def wait_for_request(self) -> bool:
        """Wait, without a limit, for the request or for :meth:`end_waiting`; return whether it was the request."""
        return self.reader.recv_bytes()[0] != OVER

    def end_waiting(self) -> None:
        self._writer.send_bytes(bytes([OVER]))


@contextmanager
def catch_stop_signals() -> Iterator[StopRequest]:
    """Yield a StopRequest that the first SIGTERM, SIGHUP or Ctrl-C makes; a later Ctrl-C raises KeyboardInterrupt.

    Outside the main thread, where Python sets no handler, signals make no request.
    """
    stop = StopRequest()

    def handle(number: int, _: FrameType | None) -> None:
        if stop.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.make_request(signal.Signals(number))

    with signal_handlers(dict.fromkeys(stop_signals(), handle)):
        yield stop


def stop_error(number: signal.Signals, step: int | None) -> BaseException:
    """Return KeyboardInterrupt for SIGINT, else StoppedError with ``step`` (0: no checkpoint, None: not known)."""
    return KeyboardInterrupt() if number == signal.SIGINT else StoppedError(number.name, step)
