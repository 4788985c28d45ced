"""Runs a run's only rank in this process, without starting another."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from flyte_ddp.errors import RankError, UserError
from flyte_ddp.launch.supervise.failures import said
from flyte_ddp.launch.supervise.link import described, words
from flyte_ddp.launch.supervise.rank_info import RankInfo
from flyte_ddp.launch.supervise.stopping import SIGNALS, stopped_by
from flyte_ddp.process import descendants_killed_at_end, signal_handlers
from flyte_ddp.runs.job import Job


def launch(job: Job, *, num_ranks: int = 1) -> None:
    """Runs the job here, and leaves torch's settings as they were.

    Raises:
        UserError: the user's mistake.
        RankError: any other failure of the rank, which is its cause.
        StoppedError: the process got SIGTERM; for Ctrl-C it is a KeyboardInterrupt.

    """
    from flyte_ddp.launch.supervise.rank import run_rank, settings_restored

    if num_ranks != 1:
        raise ValueError(f"num_ranks={num_ranks}: one rank at most runs in this process; use spawn.launch for more")
    saved = job.checkpoint.step if job.checkpoint else 0
    with settings_restored(), descendants_killed_at_end(), stopped_with_checkpoint(saved) as stopping:
        try:
            run_rank(job, RankInfo(rank=0, world_size=1, local_rank=0), stopping.offer_saving)
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
    """Saves on the first signal in a thread of its own, which then raises it once more to stop the main thread.

    A checkpoint can only be taken between two steps, for which the main thread, where Python handles signals, may have
    to go on for a moment.
    """

    def __init__(self, saved: int) -> None:
        self.save: Callable[[], int] = lambda: saved
        self.first: signal.Signals | None = None
        self.thread = threading.Thread(target=self.save_and_stop, name="stopping")
        self.step: int | None = None  # of the checkpoint, when it is written
        self.over = False

    def offer_saving(self, save: Callable[[], int]) -> None:
        """Takes what writes a checkpoint at once and returns its step."""
        self.save = save

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


@contextmanager
def stopped_with_checkpoint(saved: int) -> Iterator[Stopping]:
    """Saves and stops training on SIGTERM and Ctrl-C; a second Ctrl-C interrupts as usual.

    Args:
        saved: step of the checkpoint that there is already, 0 without any.
    """
    stopping = Stopping(saved)
    try:
        with signal_handlers(dict.fromkeys(SIGNALS, stopping.handle)):
            try:
                yield stopping
            finally:
                stopping.over = True
                if stopping.first is not None:
                    stopping.thread.join()
    except Stopped:
        assert stopping.first is not None
        raise stopped_by(stopping.first, stopping.step) from None
