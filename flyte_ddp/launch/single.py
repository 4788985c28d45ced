"""Runs a run's only rank in this process, without starting another."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flyte_ddp.errors import RankError, UserError
from flyte_ddp.launch.supervise.link import exception_message
from flyte_ddp.launch.supervise.rank_process import RankInfo
from flyte_ddp.launch.supervise.stopping import stop_requests
from flyte_ddp.process import descendants_killed_at_end
from flyte_ddp.runs.job import Job

Save = Callable[[], int]


def launch(job: Job, *, num_ranks: int = 1) -> None:
    """Run the job in this process, and leave torch's settings as they were.

    Raises:
        UserError: the user's mistake.
        RankError: any other failure of the rank, which is its cause.
        StoppedError: the process got SIGTERM; for Ctrl-C it is a KeyboardInterrupt.

    """
    from flyte_ddp.launch.supervise.rank import run_rank, settings_restored

    if num_ranks != 1:
        raise ValueError(f"num_ranks={num_ranks}: one rank at most runs in this process; use spawn.launch for more")
    saved = job.checkpoint.step if job.checkpoint else 0
    with settings_restored(), descendants_killed_at_end(), stop_with_checkpoint(saved) as offer_saving:
        try:
            run_rank(job, RankInfo(rank=0, world_size=1, local_rank=0), offer_saving)
        except UserError:
            raise
        except SystemExit as error:
            raise RankError(f"rank 0 ended with exit code {error.code} before it had finished training") from error
        except Exception as error:
            raise RankError(f"rank 0: {type(error).__name__}: {exception_message(error)}") from error


@contextmanager
def stop_with_checkpoint(saved: int) -> Iterator[Callable[[Save], None]]:
    """On SIGTERM and Ctrl-C, save a checkpoint and end the block; a second Ctrl-C ends it at once.

    A thread saves, because a checkpoint can only be taken between two steps, for which the main thread, in which Python
    handles signals, may have to continue for a moment.

    Args:
        saved: step of the checkpoint that there is already, 0 without any.

    Yields:
        What takes the function that writes a checkpoint at once and returns its step.

    Raises:
        StoppedError: after SIGTERM; KeyboardInterrupt after Ctrl-C.
    """
    save: Save = lambda: saved  # noqa: E731
    step: int | None = None  # of the checkpoint, when it is written
    over = False

    def offer_saving(offered: Save) -> None:
        nonlocal save
        save = offered

    def save_and_interrupt() -> None:
        nonlocal step
        if stop.wait():
            step = save()
            main = threading.main_thread().ident
            if not over and main is not None:
                # As a second Ctrl-C: a KeyboardInterrupt, which no `except Exception` of a model's holds up. It also
                # ends a call that waits.
                signal.pthread_kill(main, signal.SIGINT)

    with stop_requests() as stop:
        thread = threading.Thread(target=save_and_interrupt, name="stopping")
        thread.start()
        try:
            yield offer_saving
        except KeyboardInterrupt:
            if step is None:  # the second came before there was a checkpoint
                raise
            raise stop.error(step) from None
        finally:
            over = True
            stop.end_waiting()
            thread.join()
