"""When a run's state is saved, and what belongs to it. Rank 0 saves, from a thread of its own.

Random numbers are functions of the position (seed, epoch, step, sample), so the position stands for their state.
"""

from __future__ import annotations

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

from flyte_ddp import checkpoint
from flyte_ddp.distributed import rank
from flyte_ddp.evaluate import Evaluation
from flyte_ddp.job import Job
from flyte_ddp.recording import Recorder
from flyte_ddp.selection import Selection
from flyte_ddp.training_state import TrainingState


@dataclass(frozen=True)
class Run:
    """All that changes while a run trains."""

    state: TrainingState
    selection: Selection
    recorder: Recorder


@dataclass(frozen=True)
class Snapshot:
    """A run's state after a step, in memory of its own."""

    epoch: int
    step: int
    metrics_bytes: int  # of metrics.jsonl
    values: dict[str, Any]


def take(run: Run) -> Snapshot | None:
    """Copies the state after the step that was finished last, also while the next one is being computed.

    None if a step failed when it had changed a part of the state.
    """
    state, selection, recorder = run.state, run.selection, run.recorder
    with state.lock:
        if state.torn:
            return None
        values = {
            "model": state.buffers.after_step_in(state.model.state_dict()),
            "buffers": state.buffers.state(),
            "average": state.average.state_dict() if state.average else None,
            "optimizer": state.optimizer.state_dict(),
            "spoiled": state.loss_watch.spoiled,
            "draws": state.this_pass.draws,
            "seconds": dict(state.clock.seconds),
            "total_seconds": state.clock.total(),
            "waited": state.sync.waited,
            "selection": {
                "best_loss": selection.best_loss,
                "evaluations_since_best": selection.evaluations_since_best,
                "stopped": selection.stopped,
                "epoch": selection.epoch,
                "test": vars(selection.test) if selection.epoch else None,
            },
            "recorder": recorder.so_far(),
        }
        # Those are a copy already, which nothing changes.
        best = selection.weights if selection.epoch and state.hp.keep == "best" else None
        return Snapshot(state.epoch, state.step, recorder.log.size(), {**copied(values), "best": best})


def copied(value: Any) -> Any:
    """The same with tensors of its own, on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, copied(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    return copy.deepcopy(value)


def restore(run: Run, found: checkpoint.Checkpoint) -> None:
    """Puts a run, on every rank, where the checkpoint was taken."""
    state, selection, recorder = run.state, run.selection, run.recorder
    values = torch.load(checkpoint.state_in(found), map_location="cpu", weights_only=True)
    for model in (state.model, *([state.average.module] if state.average else [])):
        state.buffers.go_on(values["buffers"], model, saved=values["model"].keys())
    state.model.load_state_dict(values["model"])
    if state.average is not None:
        state.average.load_state_dict(values["average"])
    state.optimizer.load_state_dict(values["optimizer"])
    state.epoch, state.step = found.epoch, found.step
    state.buffers.begin()
    state.buffers.keep()
    state.this_pass.draws = values["draws"]
    state.clock.seconds.update(values["seconds"])
    state.clock.started -= values["total_seconds"]
    state.sync.waited = values["waited"]
    saved = values["selection"]
    selection.best_loss, selection.stopped, selection.epoch = saved["best_loss"], saved["stopped"], saved["epoch"]
    selection.evaluations_since_best = saved["evaluations_since_best"]
    if selection.epoch:
        selection.test = Evaluation(**saved["test"])
        selection.weights = values["best"] or state.kept_model().state_dict()
    recorder.go_on(values["recorder"])


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
        self.told = False
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
            self.thread.join()  # what waits gets written
            if error is not None:
                self.save()
            with self.writing:
                self.active = False

    def epoch_done(self) -> None:
        """Takes a copy of the state and has it written; one that still waits for that is left out."""
        if self.active:
            self.pending = take(self.run)
            self.wake.set()

    def save(self) -> int:
        """Writes the state as it is now, unless that is saved already; from any thread.

        Returns:
            The step of the newest checkpoint; 0 if there is none.

        """
        with self.writing:
            if self.active:
                self._save(now=True)
        return self.saved[0]

    def _save(self, *, now: bool) -> None:
        """Writes the state as it is now, if that is asked for and worth going on from; else what waits for it."""
        waiting, self.pending = self.pending, None
        try:
            for snapshot in (take(self.run) if now else None, waiting):
                if snapshot and (snapshot.step, snapshot.epoch) > self.saved and self._is_good(snapshot):
                    self._write(snapshot)
                    self.saved = (snapshot.step, snapshot.epoch)
        except Exception as error:
            if not self.told:
                print(f"could not write checkpoint: {error}; training continues", file=sys.stderr, flush=True)
            self.told = True

    def _write(self, snapshot: Snapshot) -> None:
        with (self.job.run_folder / "metrics.jsonl").open("rb") as file:
            metrics = file.read(snapshot.metrics_bytes)
        before = self.job.checkpoint.trained_in if self.job.checkpoint else ()
        now = self.run.recorder.arithmetic
        about = {
            "epoch": snapshot.epoch,
            "step": snapshot.step,
            "trained_in": [asdict(one) for one in (*before, *([] if now in before else [now]))],
            "time": time.time(),
        }
        checkpoint.write(
            next(self.slots), about, self.job.identity, metrics, lambda file: torch.save(snapshot.values, file)
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
        """Whether it is worth going on from: of a step that went wrong it may be the weights that show it first."""
        saved = snapshot.values["model"]  # a model may leave out what is frozen
        weights = (saved[name] for name, _ in self.run.state.model.named_parameters() if name in saved)
        return not snapshot.values["spoiled"] and all(bool(value.isfinite().all()) for value in weights)
