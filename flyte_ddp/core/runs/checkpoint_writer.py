"""The thread of rank 0 that writes checkpoints, for trainings and user-defined functions."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flyte_ddp.core.errors import print_to_stderr
from flyte_ddp.core.runs import checkpoint
from flyte_ddp.core.runs.checkpoint import Arithmetic, Checkpoint, Identity, State
from flyte_ddp.core.runs.run_folder import METRICS


@dataclass(frozen=True)
class Snapshot:
    """A copy of a run's state on the CPU after a step."""

    epoch: int
    step: int
    metrics_bytes: int  # length of metrics.jsonl at this step
    values: State
    trained_in: tuple[Arithmetic, ...] = ()


class CheckpointWriter:
    """Writes snapshots to the output folder's two checkpoint files in turn, in a thread.

    A new snapshot replaces a waiting snapshot.

    Args:
        output_folder: The folder of the run.
        identity: The identity of the run.
        found: The checkpoint from which this attempt resumes.
        seconds: The interval at which :meth:`take_snapshot` is written (None: only for :meth:`hand_to_thread`).
        announce: Called with True before a file is written, and with False afterwards.
    """

    def __init__(
        self,
        output_folder: Path,
        identity: Identity,
        found: Checkpoint | None,
        seconds: float | None = None,
        *,
        announce: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self.output_folder, self.identity, self.seconds = output_folder, identity, seconds
        self.newest, self.announce = found, announce
        self.write_lock = threading.Lock()  # held while the thread takes and writes a snapshot
        self.changed = threading.Condition()  # guards the attributes below and newest
        self.waiting: Snapshot | None = None
        self.puts = self.handled = (
            0  # calls of hand_to_thread, and the number of the last call whose snapshot did not fail
        )
        self.closed = self.failure_printed = False
        self.thread = threading.Thread(target=self._write_until_closed, name="checkpoints", daemon=True)

    def take_snapshot(self) -> Snapshot | None:
        """Return a copy of the current state. A subclass overrides this method.

        Returns None if the state is already saved, or must not be saved.
        """
        return None

    def is_resumable(self, snapshot: Snapshot) -> bool:  # noqa: ARG002
        """Return whether a run may resume from the snapshot. Other snapshots are not written."""
        return True

    @property
    def newest_step(self) -> int:
        return self.newest.step if self.newest else 0

    def start(self) -> None:
        if self.thread.ident is None:
            self.thread.start()

    def hand_to_thread(self, snapshot: Snapshot) -> None:
        """Let the thread write a snapshot, without waiting. Starts the thread.

        If the next snapshot comes before the thread begins to write, only the next snapshot is written.
        """
        with self.changed:
            self.waiting, self.puts = snapshot, self.puts + 1
            self.changed.notify_all()
        self.start()

    def wait_until_written(self) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self.waiting is None)

    def reject_later_snapshots(self) -> None:
        """Let the thread end without writing a waiting or later snapshot. Does not wait for the thread."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def close(self) -> None:
        """Wait until the waiting snapshot is written, and end the thread."""
        self.wait_until_written()
        self.reject_later_snapshots()
        if self.thread.ident is not None:
            self.thread.join()

    def write_newest_snapshot(self, waiting: Snapshot | None, *, now: bool) -> bool:
        """Write a checkpoint of the current state if ``now`` is True, else of the ``waiting`` snapshot.

        If the current state is already saved, writes the ``waiting`` snapshot. Skips a snapshot that is older than the
        newest checkpoint or not resumable. The caller must hold write_lock.

        Returns:
            False if writing has failed, which is printed at the first failure. Otherwise True, even if nothing was
                written.
        """
        position = (self.newest.step, self.newest.epoch) if self.newest else (0, 0)
        try:
            for snapshot in (self.take_snapshot() if now else None, waiting):
                if snapshot and (snapshot.step, snapshot.epoch) >= position and self.is_resumable(snapshot):
                    self._write_snapshot(snapshot)
                    break
        except Exception as error:
            if not self.failure_printed:
                print_to_stderr(f"checkpoint could not be written: {error}; the run continues")
            self.failure_printed = True
            return False
        return True

    def _write_until_closed(self) -> None:
        """Write each waiting snapshot, and return when closed. This is the main function of the thread.

        If no snapshot comes for ``seconds``, writes the current state. After closing, writes no waiting snapshot.
        """
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.closed or self.waiting is not None, self.seconds)
                waiting, number = self.waiting, self.puts
            with self.write_lock:
                if self.closed:
                    return
                is_handled = self.write_newest_snapshot(waiting, now=waiting is None)
            with self.changed:
                if waiting is not None and is_handled:
                    self.handled = number
                if self.waiting is waiting:
                    self.waiting = None
                self.changed.notify_all()

    def _write_snapshot(self, snapshot: Snapshot) -> None:
        with (self.output_folder / METRICS).open("rb") as file:
            metrics = file.read(snapshot.metrics_bytes)  # not the records of steps after the snapshot
        newest = self.newest.path if self.newest else None
        self.write_snapshot(
            snapshot, checkpoint.choose_next_slot(self.output_folder / checkpoint.FOLDER, newest), metrics
        )

    def write_snapshot(self, snapshot: Snapshot, path: Path, metrics: bytes) -> None:
        """Write a snapshot to the checkpoint file ``path``, and make the file the newest checkpoint.

        ``metrics`` is the content of metrics.jsonl up to the snapshot. Calls ``announce`` before and after the writing.
        On a full disk, deletes the older checkpoint and tries again.

        Raises:
            UserError: The file cannot be written.
        """
        epoch, step, trained_in = snapshot.epoch, snapshot.step, snapshot.trained_in
        new = Checkpoint(epoch, step, trained_in, time.time(), self.identity, path, metrics)
        self.announce(True)
        try:
            self.newest = checkpoint.write_and_make_room(
                self.output_folder, lambda: checkpoint.write_checkpoint(new, snapshot.values)
            )
        finally:
            self.announce(False)
