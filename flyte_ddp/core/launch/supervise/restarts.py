"""Restarts a run's ranks in place, in the same process and pod, after a failure that may not recur."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from flyte_ddp.core.errors import OutOfMemoryError, RankError
from flyte_ddp.core.launch.supervise.stopping import StopRequest, stop_error
from flyte_ddp.core.runs import checkpoint
from flyte_ddp.core.runs.run_folder import rewind_to_newest_checkpoint
from flyte_ddp.core.runs.work import Restart, Work

MEMORY_FIX = "give the ranks more memory, or reduce their memory use"


class Restarts:
    """Decides whether a run restarts in place.

    Up to ``most`` restarts may follow each other without progress.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.without_progress: tuple[Restart, ...] = ()
        self.last_error: RankError | None = None  # the failure before the last restart

    def rewind(self, work: Work, error: RankError, keep: str = "") -> Work:
        """Count a restart, set the run's folder back to the newest checkpoint, and return the work of the next start.

        If the checkpoint is later than the checkpoint of the last restart, the count begins again at 1. Removes
        temporary files of killed ranks, except the file named ``keep``. Without a checkpoint, also removes
        ``results/``.

        Raises:
            UserError: No existing checkpoint is readable, or the newest checkpoint is of another run.
        """
        found = rewind_to_newest_checkpoint(work.output_folder, work.identity, keep)
        step = found.step if found else 0
        if self.without_progress and step > self.without_progress[-1].step:
            self.without_progress = ()
        at = f" at step {error.step:,}" if error.step else ""
        number = len(self.without_progress) + 1
        self.without_progress += (Restart(f"{error.message}{at}", step, number, self.most, error.noticed),)
        self.last_error = error
        return replace(work, checkpoint=found, restarts=self.without_progress)

    def find_reason_to_end(self, output_folder: Path, error: RankError) -> RankError | None:
        """Return ``error``, with the reason, if the run must end. Return None if a restart may help.

        The run ends if the error is not recoverable, or restarts are turned off. Without progress since the last
        restart, the run also ends after ``most`` restarts, or when memory ran out twice in succession.
        """
        if not error.recoverable or not self.most:
            return error
        step = checkpoint.find_newest_step(output_folder)
        if step is None or not self.without_progress or step > self.without_progress[-1].step:
            return None
        where = f"after step {step:,}" if step else "before the first checkpoint"
        if isinstance(error, OutOfMemoryError) and isinstance(self.last_error, OutOfMemoryError):
            return error.with_reason(f", for the second time {where}; {MEMORY_FIX}")
        if len(self.without_progress) == self.most:
            return error.with_reason(f"; restarted {self.most} times {where} without progress (FLYTE_DDP_RESTARTS)")
        return None


def run_with_restarts(work: Work, run: Callable[[Work], None], stop: StopRequest) -> None:
    """Call ``run`` with the work, and again after each failure for which a restart may help.

    Before each restart, sets the run's folder back to the newest checkpoint. If ``stop`` has been requested, raises
    StoppedError or KeyboardInterrupt instead. Raises the errors of all launchers (:mod:`flyte_ddp.core.launch`).
    """
    restarts = Restarts(work.settings.restarts)
    while True:
        try:
            return run(work)
        except RankError as error:
            if (final := restarts.find_reason_to_end(work.output_folder, error)) is not None:
                raise final  # noqa: B904 (the same error, or its copy with the reason)
            work = restarts.rewind(work, error)
        if stop.signal is not None:
            raise stop_error(stop.signal, work.checkpoint.step if work.checkpoint else 0)
