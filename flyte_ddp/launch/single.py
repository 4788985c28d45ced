"""Runs the only rank of a run in this process."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flyte_ddp.errors import RankError, UserError
from flyte_ddp.launch.supervise.link import exception_message
from flyte_ddp.launch.supervise.rank_process import RankInfo
from flyte_ddp.launch.supervise.stopping import catch_stop_signals
from flyte_ddp.process import kill_new_descendants_at_end
from flyte_ddp.runs.job import Job

Save = Callable[[], int]


def launch(job: Job, *, num_ranks: int = 1) -> None:
    """Run the job's only rank in this process.

    Restores process-wide settings of torch, Python, NumPy and glibc at the end. Kills what this thread has started.

    Raises:
        UserError: the user's mistake.
        RankError: any other failure of the rank; the rank's exception is its ``__cause__``.
        StoppedError: the process got SIGTERM, and a checkpoint was written.
        KeyboardInterrupt: the process got Ctrl-C.
        ValueError: ``num_ranks`` is not 1.
    """
    from flyte_ddp.launch.supervise.rank import restore_settings, run_rank

    if num_ranks != 1:
        raise ValueError(f"num_ranks={num_ranks}: one rank at most runs in this process; use spawn.launch for more")
    saved = job.checkpoint.step if job.checkpoint else 0
    with restore_settings(), kill_new_descendants_at_end(), stop_with_checkpoint(saved) as set_save_function:
        try:
            run_rank(job, RankInfo(rank=0, world_size=1, local_rank=0), set_save_function)
        except UserError:
            raise
        except SystemExit as error:
            raise RankError(f"rank 0 ended with exit code {error.code} before it had finished training") from error
        except Exception as error:
            raise RankError(f"rank 0: {type(error).__name__}: {exception_message(error)}") from error


@contextmanager
def stop_with_checkpoint(saved: int) -> Iterator[Callable[[Save], None]]:
    """On SIGTERM or Ctrl-C, write a checkpoint and interrupt the block; a second Ctrl-C interrupts it at once.

    A thread writes the checkpoint. The main thread, in which Python handles signals, may be in the middle of an update,
    and has to finish that first.

    Args:
        saved: step of the checkpoint that the run resumes from; 0 without one.

    Yields:
        A function that takes the function that writes a checkpoint and returns its step.

    Raises:
        StoppedError: after SIGTERM.
        KeyboardInterrupt: after Ctrl-C.
    """
    save: Save = lambda: saved  # noqa: E731
    step: int | None = None  # of the checkpoint, when it is written
    over = False

    def set_save_function(offered: Save) -> None:
        """Set the function that save_and_interrupt calls."""
        nonlocal save
        save = offered

    def save_and_interrupt() -> None:
        """Wait for a request to stop, write a checkpoint, and interrupt the main thread; the thread's function."""
        nonlocal step
        if stop.wait_for_request():
            step = save()
            main = threading.main_thread().ident
            if not over and main is not None:
                # Like a second Ctrl-C, it raises KeyboardInterrupt, which `except Exception` in a model does not catch.
                # It also interrupts a system call that waits.
                signal.pthread_kill(main, signal.SIGINT)

    with catch_stop_signals() as stop:
        thread = threading.Thread(target=save_and_interrupt, name="stopping")
        thread.start()
        try:
            yield set_save_function
        except KeyboardInterrupt:
            if step is None:  # a second Ctrl-C came before the checkpoint was written
                raise
            raise stop.make_error(step) from None
        finally:
            over = True
            stop.end_waiting()
            thread.join()
