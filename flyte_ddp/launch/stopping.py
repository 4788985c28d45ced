"""Requests to stop: SIGTERM, which Kubernetes sends before it takes a pod away, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
from multiprocessing import Pipe
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from flyte_ddp.errors import StoppedError

if TYPE_CHECKING:
    from typing_extensions import Self

SIGNALS = (signal.SIGTERM, signal.SIGINT)


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
        """What ends a run that was asked to stop.

        Args:
            step: of the newest checkpoint; 0 without any, None if that is not known.
        """
        assert self.signal is not None
        return KeyboardInterrupt() if self.signal == signal.SIGINT else StoppedError(self.signal.name, step)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.make(signal.Signals(number))
