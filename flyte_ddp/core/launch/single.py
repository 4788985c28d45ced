"""Runs a single rank in this process."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from flyte_ddp.core.errors import RankError, UserError
from flyte_ddp.core.launch.supervise.failure_report import Cause, make_failure_report
from flyte_ddp.core.launch.supervise.link import OfferSaving, RankInfo, SaveFunction
from flyte_ddp.core.launch.supervise.network import LOOPBACK
from flyte_ddp.core.launch.supervise.stopping import catch_stop_signals, stop_error
from flyte_ddp.core.machine.process import kill_new_descendants_at_end
from flyte_ddp.core.machine.resources import detect_world
from flyte_ddp.core.runs.work import Work


def launch(work: Work) -> None:
    """Run the work's only rank in this process.

    Afterwards restores process-wide settings, and kills the processes that this thread has started meanwhile. On
    SIGTERM or Ctrl-C, waits for a checkpoint first. Raises the errors of all launchers (:mod:`flyte_ddp.core.launch`).

    Raises:
        ValueError: The work needs several ranks.
    """
    from flyte_ddp.core.launch.supervise.rank import restore_process_settings, run_rank

    work = work.choose_world(detect_world)
    num_ranks = work.world.num_ranks
    if num_ranks != 1:
        raise ValueError(f"num_ranks={num_ranks}: at most one rank can run in this process; use spawn.launch for more")
    work = replace(work, world=replace(work.world, hosts=(LOOPBACK,)))
    with restore_process_settings(), kill_new_descendants_at_end(), stop_with_checkpoint(work) as offer_saving:
        try:
            run_rank(work, RankInfo(rank=0, world_size=1, local_rank=0), offer_saving)
        except UserError:
            raise
        except SystemExit as error:
            raise RankError(f"rank 0 ended with exit code {error.code} before it had finished") from error
        except Exception as error:
            report = make_failure_report(error)
            raise RankError(report.format(rank=0), recoverable=report.cause is Cause.MACHINE) from error


@contextmanager
def stop_with_checkpoint(work: Work) -> Iterator[OfferSaving]:
    """Write a checkpoint on SIGTERM or Ctrl-C, then end the block by StoppedError or KeyboardInterrupt.

    Yields a setter for the function that writes the checkpoint. A thread calls this function. A second Ctrl-C ends the
    block at once by KeyboardInterrupt. In any case the end of the block waits for a checkpoint that is being written.
    Outside the main thread, signals are not caught.
    """
    resumed_step = work.checkpoint.step if work.checkpoint else 0
    save: SaveFunction = lambda _: resumed_step  # noqa: E731
    saved_step: int | None = None
    over, ending = False, threading.Lock()

    def offer_saving(function: SaveFunction) -> None:
        nonlocal save
        save = function

    def save_and_interrupt() -> None:
        """Wait for a stop request, then write a checkpoint and interrupt the main thread by SIGINT.

        If the block has ended, does not interrupt. If no stop is requested until then, does nothing.
        """
        nonlocal saved_step
        if stop.wait_for_request():
            saved_step = save(work.settings.save_seconds)
            main = threading.main_thread().ident
            with ending:
                if not over and main is not None:
                    # The signal raises KeyboardInterrupt, which `except Exception` in a model does not catch. It also
                    # interrupts a system call that waits.
                    signal.pthread_kill(main, signal.SIGINT)

    with catch_stop_signals() as stop:
        # A thread saves, because the main thread, in which Python handles signals, may have to finish an update first.
        thread = threading.Thread(target=save_and_interrupt, name="stopping")
        thread.start()
        try:
            try:
                yield offer_saving
            finally:
                with ending:  # here, so that a late interrupt is handled below
                    over = True
        except KeyboardInterrupt:
            if stop.signal is None or saved_step is None:  # a second Ctrl-C came before the checkpoint was written
                raise
            raise stop_error(stop.signal, saved_step) from None
        finally:
            stop.end_waiting()
            thread.join()
        if stop.signal is not None:  # the block ended before the thread could interrupt it
            raise stop_error(stop.signal, saved_step)
