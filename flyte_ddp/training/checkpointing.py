"""Save a run's state in a thread of rank 0; random numbers depend on the position alone, so they have no state."""

import sys
import threading
import time
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

import torch

from flyte_ddp.device_copy import copy_to_cpu
from flyte_ddp.models.zoo import find_refused_value
from flyte_ddp.parallel.distributed import rank
from flyte_ddp.runs import checkpoint
from flyte_ddp.training.job import Job
from flyte_ddp.training.own_optimizer import load_optimizer_state
from flyte_ddp.training.recording import Recorder
from flyte_ddp.training.training_state import TrainingState


@dataclass(frozen=True)
class Snapshot:
    """A copy of a run's state after a step."""

    epoch: int
    step: int
    metrics_bytes: int  # of metrics.jsonl
    values: dict[str, Any]


def take_snapshot(state: TrainingState, recorder: Recorder) -> Snapshot | None:
    """Return a CPU copy of the state after the last finished step, on rank 0; None if a step failed halfway.

    Any thread may call it. Holds the state's lock, and makes the host wait for a GPU.
    """
    selection = state.selection
    with state.lock:
        if state.inconsistent:
            return None
        values = {
            # Buffers not as they are, but as they were after the step: the next forward pass may have changed them.
            "model": state.buffers.state_dict_after_step(state.model.state_dict()),
            "buffers": state.buffers.state_dict(),
            "average": state.average.state_dict() if state.average else None,
            "optimizer": state.optimizer.state_dict(),
            "saw_non_finite": state.loss_watch.saw_non_finite,
            "draws": state.this_pass.model_draws,
            "seconds": dict(state.clock.seconds),
            "total_seconds": state.clock.total(),
            "selection": selection.state_dict(),
            "recorder": recorder.state_dict(),
        }
        # The best weights are a copy that nothing changes, so they need no second copy.
        best = selection.weights if selection.epoch and state.hp.keep == "best" else None
        return Snapshot(state.epoch, state.step, recorder.log.size(), {**copy_to_cpu(values), "best": best})


def restore_run(state: TrainingState, recorder: Recorder, found: checkpoint.Checkpoint) -> None:
    """Load a checkpoint into the run's state and its recorder, on each rank."""
    values = torch.load(checkpoint.read_saved_state(found), map_location="cpu", weights_only=True)
    state.model.load_state_dict(values["model"])
    state.buffers.load_state_dict(values["buffers"])
    if state.average is not None:
        state.average.load_state_dict(values["average"])
    load_optimizer_state(state.optimizer, values["optimizer"])
    state.epoch, state.step = found.epoch, found.step
    state.this_pass.model_draws = values["draws"]
    state.clock.add_earlier(values["seconds"], total=values["total_seconds"])
    # Unless a copy of the best weights was saved, the kept weights are those of the model or of its average.
    state.selection.load_state_dict(values["selection"], values["best"] or state.kept_model().state_dict())
    recorder.load_state_dict(values["recorder"])


class Checkpointer:
    """Saves a run's state after each epoch, every ``checkpoint_seconds``, on request, and when training fails.

    At its end waits for the last checkpoint. Idle on other ranks than 0, or if ``checkpoint_seconds`` is 0.
    """

    def __init__(self, job: Job, state: TrainingState, recorder: Recorder) -> None:
        self.job, self.state, self.recorder = job, state, recorder
        found = job.checkpoint
        self.slots = checkpoint.alternate_slots(job.run_folder / checkpoint.FOLDER, found.path if found else None)
        self.slot = next(self.slots)  # the older of the two files
        self.saved_position = (found.step, found.epoch) if found else (0, 0)  # of the newest checkpoint
        self.write_lock = threading.Lock()
        self.wake = threading.Event()  # set when there is something to write, or at the end
        self.pending: Snapshot | None = None  # the waiting copy
        self.closed = False  # whether training has ended
        self.failure_printed = False
        self.active = rank() == 0 and job.settings.checkpoint_seconds > 0  # whether checkpoints may still be written
        self.thread = threading.Thread(target=self._write_until_closed, name="checkpoints", daemon=True)

    def __enter__(self) -> Self:
        if self.active:
            self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.thread.ident is not None:  # it was started
            self.closed = True
            self.wake.set()
            self.thread.join()  # which first writes the waiting copy
            if error is not None and not isinstance(error, torch.AcceleratorError):  # then nothing can be copied
                self.save_now()
            with self.write_lock:  # another thread may be in save_now
                self.active = False

    def save_epoch(self) -> None:
        """Copy the state for the thread to write; the copy replaces one that is not written yet."""
        if self.active:
            self.pending = take_snapshot(self.state, self.recorder)
            self.wake.set()

    def save_now(self, seconds: float = 0.0) -> int:  # noqa: ARG002 (a copy of the state is at hand at any time)
        """Write a last checkpoint unless the state is saved; return the newest checkpoint's step, 0 if there is none.

        Any thread may call it; waits for a checkpoint that is being written. Prints a failure instead of raising it.
        """
        with self.write_lock:
            if self.active:
                self._write_newest_snapshot(now=True)
                self.active = False  # because the caller reports this step as the one to resume after
        return self.saved_position[0]

    def _write_newest_snapshot(self, *, now: bool) -> None:
        """Write the current state (``now``), or else the waiting copy, if resumable and newer. Needs ``write_lock``."""
        waiting, self.pending = self.pending, None
        try:
            # The current state first: it is newer than the waiting copy, which is then skipped as older.
            for snapshot in (take_snapshot(self.state, self.recorder) if now else None, waiting):
                if snapshot and (snapshot.step, snapshot.epoch) > self.saved_position and self._is_resumable(snapshot):
                    self._write_snapshot(snapshot)
                    self.saved_position = (snapshot.step, snapshot.epoch)
        except Exception as error:
            if not self.failure_printed:
                print(f"checkpoint could not be written: {error}; training continues", file=sys.stderr, flush=True)
            self.failure_printed = True

    def _write_snapshot(self, snapshot: Snapshot) -> None:
        with (self.job.run_folder / "metrics.jsonl").open("rb") as file:
            metrics = file.read(snapshot.metrics_bytes)  # not the records of steps after the snapshot
        before = self.job.checkpoint.trained_in if self.job.checkpoint else ()
        description = {
            "epoch": snapshot.epoch,
            "step": snapshot.step,
            "trained_in": [asdict(one) for one in dict.fromkeys((*before, self.recorder.arithmetic))],
            "time": time.time(),
        }
        checkpoint.write_checkpoint(
            self.slot, description, self.job.identity, metrics, lambda file: torch.save(snapshot.values, file)
        )
        self.slot = next(self.slots)  # not after a failed write: it left this file as it was, the older of the two

    def _write_until_closed(self) -> None:
        closed = False
        while not closed:
            self.wake.wait(self.job.settings.checkpoint_seconds)
            self.wake.clear()
            closed = self.closed  # read before the copy is taken: what comes later sets the event again
            with self.write_lock:
                if self.active:
                    self._write_newest_snapshot(now=not closed and self.pending is None)

    def _is_resumable(self, snapshot: Snapshot) -> bool:
        """Return True if losses and trained weights are finite, and torch.load(weights_only=True) takes the rest."""
        saved = snapshot.values["model"]
        # A wrong step may show in the weights before it shows in a loss. Frozen weights may be infinite, as a mask is.
        # A user's state_dict may have other names.
        trained = (name for name, weight in self.state.model.named_parameters() if weight.requires_grad)
        weights = (saved[name] for name in trained if name in saved)
        is_finite = not snapshot.values["saw_non_finite"] and all(bool(value.isfinite().all()) for value in weights)
        return is_finite and not find_refused_value(saved)
