"""Requests to stop by SIGTERM, Ctrl-C or a closed terminal. Kubernetes sends SIGTERM before it removes a pod."""

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from types import FrameType

from flyte_ddp.core.errors import StoppedError
from flyte_ddp.core.machine.process import list_stop_signals, undone_in_forks, use_signal_handlers

STOP_LISTENING = 0  # not a signal's number; ends a thread that waits for numbers of signals


@contextmanager
def call_on_signals(numbers: Collection[signal.Signals], function: Callable[[], None]) -> Iterator[None]:
    """Call a function in a thread whenever a signal of ``numbers`` comes in the block.

    The signals have no other effect. Enter the block in the main thread. The call also comes while the main thread is
    in a collective operation. The end of the block waits for a call that is running.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        while (number := os.read(reader, 1)[0]) != STOP_LISTENING:
            if number in numbers:  # Python writes the number of each signal that it handles
                function()

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        with (
            use_signal_handlers(dict.fromkeys(numbers, lambda *_: None)),
            undone_in_forks(lambda: signal.set_wakeup_fd(wakeup)),
        ):
            yield
    finally:
        signal.set_wakeup_fd(wakeup)
        os.write(writer, bytes([STOP_LISTENING]))  # closing is not enough, because forked processes keep the pipe open
        thread.join()
        os.close(writer)
        os.close(reader)


class StopRequest:
    """A request to stop.

    ``signal`` is None until the request. After the request, ``reader`` is ready for ``connection.wait``.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.by_launcher = False  # whether a signal has come to this process
        self.reader, self._writer = Pipe(duplex=False)

    def make_request(self, number: signal.Signals) -> None:
        """Request a stop as if this signal had come. Only the first call has an effect."""
        if self.signal is None:
            self.signal = number
            # Not send(): an exception may rise in here, and CPython 3.12.1 crashes when it collects send()'s buffer.
            self._writer.send_bytes(bytes([number]))

    def forget_ranks(self) -> None:
        """Undo a request of a rank, so that ranks may start again."""
        if self.signal is not None and not self.by_launcher:
            self.reader.recv_bytes()
            self.signal = None
            if self.by_launcher:  # the signal has come meanwhile
                self.make_request(signal.SIGTERM)

    def wait_for_request(self) -> bool:
        """Wait, without a limit, for the request or for :meth:`end_waiting`.

        Returns whether the request came.
        """
        return self.reader.recv_bytes()[0] != STOP_LISTENING

    def end_waiting(self) -> None:
        self._writer.send_bytes(bytes([STOP_LISTENING]))


StopHandler = Callable[[int, FrameType | None], None]
_handlers_of_threads: list[StopHandler] = []  # of blocks of catch_stop_signals outside the main thread


@contextmanager
def catch_stop_signals() -> Iterator[StopRequest]:
    """Yield a StopRequest that the first SIGTERM, SIGHUP or Ctrl-C makes.

    A later Ctrl-C raises KeyboardInterrupt, and other later signals have no effect. A SIGHUP that ``nohup`` ignores
    stays ignored. Outside the main thread, signals make no request, unless :func:`forward_stop_signals` was called.
    """
    stop = StopRequest()

    def handle(number: int, _: FrameType | None) -> None:
        if stop.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.by_launcher = True
        stop.make_request(signal.Signals(number))

    if threading.current_thread() is threading.main_thread():
        with use_signal_handlers(dict.fromkeys(list_stop_signals(), handle)):
            yield stop
        return
    _handlers_of_threads.append(handle)
    try:
        yield stop
    finally:
        _handlers_of_threads.remove(handle)


def forward_stop_signals() -> None:
    """Let stop signals reach runs in other threads than the main thread, for the rest of the process.

    While no run is in another thread, a signal has its former effect, and so has a second Ctrl-C. Outside the main
    thread, does nothing.
    """
    if threading.current_thread() is threading.main_thread():
        for number in list_stop_signals():
            signal.signal(number, make_forwarding_handler(signal.getsignal(number)))


def make_forwarding_handler(former: StopHandler | int | None) -> StopHandler:
    """Return a signal handler that passes signals on to the runs in other threads.

    Without such a run, and after a second Ctrl-C, the signal has the effect of ``former``, which is a handler, SIG_DFL,
    SIG_IGN or None (a handler that Python does not know, replaced by SIG_DFL).
    """

    def pass_on(number: int, frame: FrameType | None) -> None:
        """Call the handlers of all runs in other threads, or have the former effect."""
        handlers = [*_handlers_of_threads]
        try:
            for handler in handlers:
                handler(number, frame)
        except KeyboardInterrupt:  # a second Ctrl-C
            handlers = []
        if handlers or former == signal.SIG_IGN:
            return
        if callable(former):
            former(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    return pass_on


def stop_error(number: signal.Signals, step: int | None) -> BaseException:
    """Return KeyboardInterrupt for SIGINT, else StoppedError with ``step``.

    ``step`` is 0 without a checkpoint, and None if the step is unknown.
    """
    return KeyboardInterrupt() if number == signal.SIGINT else StoppedError(number.name, step)
