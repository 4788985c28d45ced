"""Take and restore snapshots of a training.

A thread of runs/checkpoint_writer.py writes snapshots into checkpoints. Random numbers depend on the position alone, so
snapshots hold no random state.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Self

import torch

from flyte_ddp.core.errors import print_to_stderr
from flyte_ddp.core.machine.device_copy import copy_to_cpu
from flyte_ddp.core.models.state_dicts import find_unloadable_value
from flyte_ddp.core.parallel.distributed import rank
from flyte_ddp.core.runs import checkpoint
from flyte_ddp.core.runs.checkpoint_writer import CheckpointWriter, Snapshot
from flyte_ddp.core.runs.work import Work
from flyte_ddp.core.training.optimizer_state import list_changed_attributes, load_optimizer_state, set_attributes
from flyte_ddp.core.training.recording import Recorder, rebuild_lost_metrics
from flyte_ddp.core.training.training_state import TrainingState

LARGE = ("model", "average", "optimizers")  # parts of a saved state that are copied when they are loaded


def load_training_state(state: TrainingState, recorder: Recorder, found: checkpoint.Checkpoint) -> None:
    """Load a checkpoint into the objects of training, and set the epoch and step from which training resumes.

    Loads model, buffers, moving average, optimisers, selection, clock and recorder. Does not change the file.
    """
    values = checkpoint.load_state(found)
    # Copied, because a value that a rank keeps would otherwise keep the mapped file in use.
    values |= copy_to_cpu({name: value for name, value in values.items() if name not in LARGE})
    state.set_optimizer_mode(training=values["optimizers_train"])  # first, before a state exists that this would change
    state.model.load_state_dict(values["model"])
    state.buffers.load_state_dict(values["buffers"])
    if state.average is not None:
        state.average.load_state_dict(values["average"])
    for optimizer, saved in zip(state.optimizers, values["optimizers"], strict=True):
        load_optimizer_state(optimizer, saved)
    for optimizer, attributes in zip(state.optimizers, values["optimizer_attributes"], strict=True):
        set_attributes(optimizer, attributes)
    state.epoch, state.step = found.epoch, found.step
    state.this_pass.model_draws = values["draws"]
    state.clock.add_earlier_seconds(values["seconds"], total=values["total_seconds"])
    # Unless a copy of the best weights was saved, the kept weights are those of the model or of its average.
    state.selection.load_state_dict(values["selection"], values["best"] or state.kept_model().state_dict())
    recorder.load_state_dict(values["recorder"])


def is_finite(value: torch.Tensor) -> bool:
    """Return whether all numbers of a tensor are finite. A tensor without numbers is finite."""
    if not value.is_floating_point() or not value.numel():
        return bool(value.isfinite().all())
    # One pass without a temporary tensor, and NaN shows in both: isfinite() of 200 MB takes 0.3 s, and this 0.01 s.
    return all(bool(extreme.isfinite()) for extreme in value.aminmax())


class Checkpointer(CheckpointWriter):
    """Saves a run's state after each epoch, every ``checkpoint_seconds``, on request, and when training fails.

    Use this object in a ``with`` block, whose end waits for the last checkpoint. After an exception in the block, the
    state is saved unless the device has failed. Ranks other than 0 save only if rank 0 is lost. If
    ``checkpoint_seconds`` is 0, nothing is saved.
    """

    def __init__(
        self, work: Work, state: TrainingState, recorder: Recorder, announce: Callable[[bool], None] = lambda _: None
    ) -> None:
        """Prepare to save ``state`` and ``recorder`` into the folder of ``work``. The thread starts with the block.

        If this rank is not rank 0, or ``checkpoint_seconds`` is 0, starts closed. ``announce`` is called with True
        before a file is written, and with False afterwards.
        """
        seconds = state.settings.checkpoint_seconds
        super().__init__(work.output_folder, work.identity, work.checkpoint, seconds, announce=announce)
        self.state, self.recorder = state, recorder
        self.trained_before = work.checkpoint.trained_in if work.checkpoint else ()
        self.saves = state.settings.checkpoint_seconds > 0
        self.closed = rank() != 0 or not self.saves  # from the start: idle

    def __enter__(self) -> Self:
        if not self.closed:
            self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and not isinstance(error, torch.AcceleratorError):  # a failed device can copy nothing
            self.save_last()
        self.close()

    def take_snapshot(self) -> Snapshot | None:
        """Copy the training's state after the last step to the CPU, and return the copy.

        Any thread may call this method. Waits while the weights are updated. Returns None if the last step is saved
        already, or if an update has failed halfway.
        """
        state, recorder, selection = self.state, self.recorder, self.state.selection
        saved = (self.newest.step, self.newest.epoch) if self.newest else (0, 0)
        trained_in = dict.fromkeys((*self.trained_before, recorder.arithmetic))
        with state.lock:
            if state.inconsistent or (state.step, state.epoch) <= saved:
                return None
            values = {
                # Buffers as they were after the step, because the next forward pass may have changed the buffers.
                "model": state.buffers.state_dict_after_step(state.model.state_dict()),
                "buffers": state.buffers.state_dict(),
                "average": state.average.state_dict() if state.average else None,
                "optimizers": [optimizer.state_dict() for optimizer in state.optimizers],
                "optimizer_attributes": [*map(list_changed_attributes, state.optimizers, state.attributes_at_start)],
                "optimizers_train": state.optimizers_train,
                "saw_non_finite": state.loss_watch.saw_non_finite,
                "draws": state.this_pass.model_draws,
                "seconds": dict(state.clock.seconds),
                "total_seconds": state.clock.total(),
                "selection": selection.state_dict(),
                "recorder": recorder.state_dict(),
            }
            # The best weights are a copy that nothing changes, so they need no second copy.
            best = selection.weights if selection.epoch and state.plan.selection.keep == "best" else None
            copied = {**copy_to_cpu(values), "best": best}
            return Snapshot(state.epoch, state.step, recorder.size(), copied, tuple(trained_in))

    def save_epoch(self) -> None:
        """Copy the state after an epoch for the writer thread. Does not wait for the writing.

        Waits while the weights are updated. A later snapshot may replace the copy before the thread writes the copy.
        Does nothing if closed or already saved, or if an update has failed halfway.
        """
        if not self.closed and (snapshot := self.take_snapshot()):
            self.hand_to_thread(snapshot)

    def save_last(self, seconds: float = 0.0) -> int:  # noqa: ARG002 (a copy of the state is at hand at any time)
        """Write a last checkpoint unless the state is already saved, and reject later checkpoints.

        Any thread may call this method. If a checkpoint is being written, waits for the end. If writing fails, prints
        the error instead of raising. A state with a loss or weight that is not finite is not saved. ``seconds`` is
        ignored.

        Returns:
            The newest saved step, or 0 without a checkpoint.
        """
        with self.write_lock:
            if not self.closed:
                self.write_newest_snapshot(self.waiting, now=True)
                self.reject_later_snapshots()  # because the caller reports that the run resumes after this step
        return self.newest_step

    def save_for_rank_0(self, handover: checkpoint.Handover) -> int | None:
        """Write a checkpoint of this rank's state, because rank 0 is lost. Any thread may call this method.

        Waits while the weights are updated. If this rank is not ahead of rank 0's newest checkpoint, writes nothing. If
        writing fails, prints the error instead of raising.

        Args:
            handover: Rank 0's records, the position of rank 0's newest checkpoint, and the name of the file to write.

        Returns:
            The step of the written checkpoint, or the step of rank 0's newest checkpoint if nothing had to be written.
                None if checkpoints are off, the state is not finite, an update has failed halfway, or writing failed.
        """
        state = self.state
        if (state.step, state.epoch) <= (handover.step, handover.epoch):
            return handover.step
        try:
            snapshot = self.take_snapshot() if self.saves else None
            if snapshot is None or not self.is_resumable(snapshot):
                return None
            metrics = rebuild_lost_metrics(handover.metrics, self.recorder.last_records, snapshot.epoch, snapshot.step)
            path = self.output_folder / checkpoint.FOLDER / handover.name
            self.write_snapshot(snapshot, path, metrics)
        except Exception as error:
            print_to_stderr(f"checkpoint could not be written: {error}")
            return None
        return snapshot.step

    def is_resumable(self, snapshot: Snapshot) -> bool:
        """Return whether a run can resume from a snapshot.

        Losses and trained weights must be finite, and ``torch.load(weights_only=True)`` must accept the state_dict.
        """
        saved = snapshot.values["model"]
        # A wrong step may show in the weights before it shows in a loss. Frozen weights may be infinite, as a mask is.
        # A user's state_dict may have other names.
        trained = (name for name, weight in self.state.model.named_parameters() if weight.requires_grad)
        weights = (saved[name] for name in trained if name in saved)
        finite = not snapshot.values["saw_non_finite"] and all(map(is_finite, weights))
        return finite and not find_unloadable_value(saved)
