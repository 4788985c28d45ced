"""The connection of a worker of torch Elastic to rank 0, and the end of the worker after the run.

Elastic passes on an error only as text. Therefore the exception is pickled to a file beside Elastic's error file.
"""

import os
import pickle
import sys
import threading
import time
import traceback
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flyte_ddp.core.errors import RankError
from flyte_ddp.core.files import hold_lock
from flyte_ddp.core.launch.supervise.link import Link
from flyte_ddp.core.launch.supervise.report import ROOT_CAUSES, find_cause
from flyte_ddp.core.machine import process
from flyte_ddp.core.runs.run_folder import make_handover

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # variable with the path at which Elastic expects a worker's error as text
ERROR_SUFFIX = ".pickle"  # of the file beside it that holds the exception
STAND_IN = ".stand-in.tmp"  # in the run's folder, locked by the rank that saves in rank 0's place
OUTCOME_SECONDS = 45.0  # for the run's outcome to come; longer than the kernel needs to detect a lost host
UNWIND_SECONDS = (2.0, 10.0)  # for a rank, and for rank 0, to raise an exception after the run has failed
NOTICE_SECONDS = 1.0  # for Elastic to find a worker that was killed, before other workers exit


class WorkerLink(Link):
    """An Elastic worker's connection to rank 0, which also receives the run's outcome.

    Create the link in the rank's thread.
    """

    def __init__(self, pipe: Connection, rank: int, resumed_step: int, run_folder: Path | None = None) -> None:
        self.run_folder = run_folder  # None: this host does not see the folder
        self.outcome: Future[BaseException | None] = Future()
        self.main = threading.get_ident()
        self.rank = rank
        self.unwinding = threading.Event()
        super().__init__(pipe, resumed_step)

    def handle_message(self, message: dict[str, Any]) -> None:
        """Handle a message of rank 0 in the link's thread.

        The message "over" sets the run's outcome, and may end this process after an error. The message "stack" is
        answered with the main thread's stack. Other messages are handled as by any Link.
        """
        if message["kind"] == "over":
            self.set_outcome_or_exit(message["error"])
        elif message["kind"] == "stack":
            frame = sys._current_frames().get(self.main)
            self.send("stack", text="".join(traceback.format_stack(frame)).rstrip() if frame else "")
        else:
            super().handle_message(message)

    def handle_lost_launcher(self) -> None:
        """Set the loss of rank 0 as the run's outcome, which may end this process.

        If this host sees the run's folder, one of the ranks first saves a checkpoint in rank 0's place.
        """
        if self.run_folder is not None:
            with suppress(OSError), hold_lock(self.run_folder, STAND_IN, wait=False):  # one rank is enough
                self._stand_in(make_handover(self.run_folder))
                (self.run_folder / STAND_IN).unlink()
        self.set_outcome_or_exit(lost_rank_0_error())

    def set_outcome_or_exit(self, outcome: BaseException | None) -> None:
        """Set the run's outcome, once, and end this process after an error.

        After an error, waits up to 2 s (rank 0: 10 s) for the main thread to call :meth:`wait_for_outcome`. If the main
        thread does not, reports the error to Elastic, kills child processes, and exits with 1. A RankError is set only
        after a pause of 1 s.
        """
        if self.outcome.done():
            return
        if isinstance(outcome, RankError):
            time.sleep(NOTICE_SECONDS)  # so that Elastic sees the killed worker exit first, and reports it
        self.outcome.set_result(outcome)
        if outcome is not None and not self.unwinding.wait(UNWIND_SECONDS[self.rank == 0]):
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            with suppress(OSError):
                get_error_handler().record_exception(outcome)
            write_exception(outcome)
            process.kill_descendants()
            os._exit(1)

    def wait_for_outcome(self, own_error: BaseException | None = None) -> BaseException | None:
        """Return the run's error, or None if the run has completed.

        Without ``own_error`` waits without a limit. If this rank has failed, its error is ``own_error``, and the wait
        is at most 45 s. Then, without a run's error, returns ``own_error``. But if ``own_error`` is of a failed
        collective operation, returns the loss of rank 0, its likely cause.
        """
        self.unwinding.set()
        if own_error is None:
            return self.outcome.result()  # other hosts may still be sending results
        with suppress(TimeoutError):
            if (outcome := self.outcome.result(OUTCOME_SECONDS)) is not None:
                return outcome
        return own_error if find_cause(own_error) in ROOT_CAUSES else lost_rank_0_error()


def lost_rank_0_error() -> RankError:
    return RankError("lost the connection to rank 0; see the log of rank 0's host for the cause", recoverable=True)


def write_exception(error: BaseException) -> None:
    """Pickle an exception beside Elastic's error file, unless the pickle exists. A failure to pickle is ignored."""
    path = Path(os.environ[ERROR_FILE]).with_suffix(ERROR_SUFFIX)
    with suppress(Exception):  # pickling a user-defined exception may raise anything
        if not path.exists():
            path.write_bytes(pickle.dumps(error))
