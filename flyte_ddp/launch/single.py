"""Runs a run's only rank in this process, without starting another."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from flyte_ddp.errors import RankError, UserError
from flyte_ddp.job import Job
from flyte_ddp.launch.failures import said
from flyte_ddp.launch.link import described, words
from flyte_ddp.launch.offspring import ended_with_the_block
from flyte_ddp.launch.place import Place
from flyte_ddp.launch.stopping import SIGNALS, stopped_by


def launch(job: Job, *, num_ranks: int = 1) -> None:
    """Runs the job here, and leaves torch's settings as they were.

    Raises:
        UserError: the user's mistake.
        RankError: any other failure of the rank, which is its cause.
        StoppedError: the process got SIGTERM; for Ctrl-C it is a KeyboardInterrupt.

    """
    from flyte_ddp.launch.rank import run_rank, settings_restored

    if num_ranks != 1:
        raise ValueError(f"num_ranks={num_ranks}: one rank at most runs in this process; use spawn.launch for more")
    with (
        settings_restored(),
        ended_with_the_block(),
        Stopping(job.checkpoint.step if job.checkpoint else 0) as stopping,
    ):
        try:
            run_rank(job, Place(rank=0, world_size=1, device=0), stopping.offer_saving)
        except (UserError, Stopped):
            raise
        except SystemExit as error:
            raise RankError(f"rank 0 ended with exit code {error.code} before it had finished training") from error
        except Exception as error:
            told, (message, whole) = described(error), words(error)
            if whole:
                raise RankError(f"rank 0: {type(error).__name__}: {message}") from error
            # Without its cause, which whoever prints this would print as well.
            raise RankError(said({**told, "rank": 0}), details=told["traceback"]) from None


class Stopped(BaseException):
    """Unwinds training, which nothing must hold up on its way."""


class Stopping:
    """Saves and stops training on SIGTERM and Ctrl-C; a second Ctrl-C interrupts as usual. A context manager.

    A checkpoint can only be taken between two steps, for which the main thread, where Python handles signals, may have
    to go on for a moment. So a thread saves, and raises the signal once more. Outside the main thread signals do what
    they did.
    """

    def __init__(self, saved: int) -> None:
        self.save: Callable[[], int] = lambda: saved
        self.first: signal.Signals | None = None
        self.thread = threading.Thread(target=self.save_and_stop, name="stopping")
        self.step: int | None = None  # of the checkpoint, when it is written
        self.over = False
        self.before: dict[signal.Signals, Any] = {}

    def offer_saving(self, save: Callable[[], int]) -> None:
        """Takes what writes a checkpoint at once and returns its step."""
        self.save = save

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self.handle) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.over = True
        if self.first is not None:
            self.thread.join()
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if isinstance(error, Stopped) and self.first is not None:
            raise stopped_by(self.first, self.step) from None

    def handle(self, number: int, _: FrameType | None) -> None:
        """Handles a signal."""
        if self.first is None:
            self.first = signal.Signals(number)
            self.thread.start()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        elif self.step is not None and not self.over:
            raise Stopped

    def save_and_stop(self) -> None:
        """Saves, and has the main thread stop, even where it waits for something."""
        self.step = self.save()
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGTERM)
