"""When a run's state is saved, and what belongs to it. Rank 0 saves, from a thread of its own.

Random numbers are functions of the position (seed, epoch, step, sample), so their state is not saved.
"""

import copy
import sys
import threading
import time
from collections import OrderedDict
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from flyte_ddp.models.zoo import refused_value
from flyte_ddp.parallel.distributed import rank
from flyte_ddp.runs import checkpoint
from flyte_ddp.runs.job import Job
from flyte_ddp.training.diagnosis import LossWatch
from flyte_ddp.training.recording import Recorder
from flyte_ddp.training.selection import Selection
from flyte_ddp.training.training_state import TrainingState


@dataclass(frozen=True)
class Run:
    """The objects of a run that change while it trains."""

    state: TrainingState
    selection: Selection
    recorder: Recorder
    loss_watch: LossWatch


@dataclass(frozen=True)
class Snapshot:
    """A copy of a run's state after a step."""

    epoch: int
    step: int
    metrics_bytes: int  # of metrics.jsonl
    values: dict[str, Any]


def take_snapshot(run: Run) -> Snapshot | None:
    """Copy the state after the last finished step to the CPU, also while the next step is being computed.

    Holds the state's lock meanwhile. Returns None if a step failed when it had changed a part of the state.
    """
    state, selection = run.state, run.selection
    with state.lock:
        if state.inconsistent:
            return None
        values = {
            "model": state.buffers.after_step_in(state.model.state_dict()),
            "buffers": state.buffers.state_dict(),
            "average": state.average.state_dict() if state.average else None,
            "optimizer": state.optimizer.state_dict(),
            "saw_non_finite": run.loss_watch.saw_non_finite,
            "draws": state.this_pass.draws,
            "seconds": dict(state.clock.seconds),
            "total_seconds": state.clock.total(),
            "selection": selection.state_dict(),
            "recorder": run.recorder.state_dict(),
        }
        # The best weights are a copy already, which nothing changes.
        best = selection.weights if selection.epoch and state.hp.keep == "best" else None
        return Snapshot(state.epoch, state.step, run.recorder.log.size(), {**copy_to_cpu(values), "best": best})


def copy_to_cpu(value: Any) -> Any:
    """Return a deep copy with all tensors on the CPU; a state_dict keeps its ``_metadata``."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) in (dict, OrderedDict):
        same = copy.copy(value)
        same.update({key: copy_to_cpu(item) for key, item in value.items()})
        return same
    if type(value) in (list, tuple):
        return type(value)(copy_to_cpu(item) for item in value)
    return copy.deepcopy(value)


def restore_run(run: Run, found: checkpoint.Checkpoint) -> None:
    """Load a checkpoint into the objects of a run; every rank does."""
    state = run.state
    values = torch.load(checkpoint.state_in(found), map_location="cpu", weights_only=True)
    state.model.load_state_dict(values["model"])
    state.buffers.load_state_dict(values["buffers"])
    if state.average is not None:
        state.average.load_state_dict(values["average"])
    state.optimizer.load_state_dict(values["optimizer"])
    state.epoch, state.step = found.epoch, found.step
    state.this_pass.draws = values["draws"]
    state.clock.seconds.update(values["seconds"])
    state.clock.started -= values["total_seconds"]
    run.selection.load_state_dict(values["selection"], values["best"] or state.kept_model().state_dict())
    run.recorder.load_state_dict(values["recorder"])


class Checkpointer:
    """Saves a run's state after each epoch, every so many seconds, when asked to, and when training fails.

    Training waits while a copy is taken in memory, and for nothing else. A context manager.
    """

    def __init__(self, job: Job, run: Run) -> None:
        self.job, self.run = job, run
        found = job.checkpoint
        self.slots = checkpoint.slots(job.run_folder / checkpoint.FOLDER, found.path if found else None)
        self.saved = (found.step, found.epoch) if found else (0, 0)
        self.writing = threading.Lock()
        self.wake = threading.Event()
        self.pending: Snapshot | None = None
        self.closed = False
        self.final = False
        self.reported = False  # whether a failure to write has been printed
        self.active = rank() == 0 and job.settings.checkpoint_seconds > 0
        self.thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)

    def __enter__(self) -> Self:
        if self.active:
            self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.active:
            self.closed = True
            self.wake.set()
            self.thread.join()  # a copy that waits is written before
            if error is not None:
                self.save()
            with self.writing:
                self.active = False

    def epoch_done(self) -> None:
        """Copy the state, to be written by the thread; the copy replaces one that still waits."""
        if self.active:
            self.pending = take_snapshot(self.run)
            self.wake.set()

    def save(self) -> int:
        """Write the state as it is now, unless that is saved already; from any thread. No checkpoint is written after.

        Returns:
            The step of the newest checkpoint; 0 if there is none.
        """
        with self.writing:
            if self.active:
                self._save(now=True)
                self.final = True  # no later checkpoint, because the caller reports this step as the resume point
        return self.saved[0]

    def _save(self, *, now: bool) -> None:
        """Write the state as it is ``now``, if a run can resume from it; else the copy that waits to be written."""
        if self.final:
            return
        waiting, self.pending = self.pending, None
        try:
            for snapshot in (take_snapshot(self.run) if now else None, waiting):
                if snapshot and (snapshot.step, snapshot.epoch) > self.saved and self._is_good(snapshot):
                    self._write(snapshot)
                    self.saved = (snapshot.step, snapshot.epoch)
        except Exception as error:
            if not self.reported:
                print(f"could not write checkpoint: {error}; training continues", file=sys.stderr, flush=True)
            self.reported = True

    def _write(self, snapshot: Snapshot) -> None:
        with (self.job.run_folder / "metrics.jsonl").open("rb") as file:
            metrics = file.read(snapshot.metrics_bytes)
        before = self.job.checkpoint.trained_in if self.job.checkpoint else ()
        description = {
            "epoch": snapshot.epoch,
            "step": snapshot.step,
            "trained_in": [asdict(one) for one in dict.fromkeys((*before, self.run.recorder.arithmetic))],
            "time": time.time(),
        }
        checkpoint.write(
            next(self.slots), description, self.job.identity, metrics, lambda file: torch.save(snapshot.values, file)
        )

    def _work(self) -> None:
        closed = False
        while not closed:
            self.wake.wait(self.job.settings.checkpoint_seconds)
            self.wake.clear()
            closed = self.closed
            with self.writing:
                self._save(now=not closed and self.pending is None)

    def _is_good(self, snapshot: Snapshot) -> bool:
        """Return whether a run can resume from the snapshot: its values can be loaded from a file and are finite.

        A step that went wrong may show in the weights before it shows in a loss.
        """
        saved = snapshot.values["model"]  # a model may leave out what is frozen
        if refused_value(saved):
            return False
        weights = (saved[name] for name, _ in self.run.state.model.named_parameters() if name in saved)
        return not snapshot.values["saw_non_finite"] and all(bool(value.isfinite().all()) for value in weights)
