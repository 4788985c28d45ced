"""Checkpoints of a user-defined function: the saved states, and when a save is due."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.machine.device_copy import copy_to_cpu, map_state_leaves
from flyte_ddp.core.models.state_dicts import find_unloadable_value
from flyte_ddp.core.runs.checkpoint import FOLDER, Checkpoint, Identity, State, load_state
from flyte_ddp.core.runs.checkpoint_writer import CheckpointWriter, Snapshot
from flyte_ddp.core.runs.run_folder import METRICS

UNANNOUNCED_SECONDS = 8.0  # for the next save after a request to stop, if the function never asks whether a save is due
ANSWER_SHARE = 0.9  # of the time for the next save: the launcher must get the answer before the time is over


class Checkpoints(CheckpointWriter):
    """Saves and loads the states of a user-defined function.

    Call :meth:`close` when the function has ended. A save is due ``checkpoint_seconds`` after the last save (0: never),
    and after a request to stop. If rank 0 writes into the same folder from another host, a rank passes ``link_name``.
    """

    def __init__(
        self,
        folder: Path,
        identity: Identity,
        found: Checkpoint | None,
        checkpoint_seconds: float,
        *,
        link_name: str = "",
        announce: Callable[[bool], None] = lambda _: None,
    ) -> None:
        super().__init__(folder, identity, found, announce=announce)
        self.link = folder / FOLDER / link_name if link_name else None
        self.checkpoint_seconds = checkpoint_seconds
        self.last_step = found.step if found else 0  # the step of the last save
        self.last_time = time.monotonic()
        self.checked_types: set[type] = set()  # that torch.load accepts
        self.asked = self.used = self.stop_requested = False

    def due(self) -> bool:
        """Return whether a save is due.

        A call also records that the user's function asks for saves, which :meth:`save_last` reads.
        """
        self.asked = self.used = True
        return self.stop_requested or 0 < self.checkpoint_seconds <= time.monotonic() - self.last_time

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Copy a state to the CPU, and let the thread write the copy as a checkpoint. Does not wait for the writing.

        The next save is due ``checkpoint_seconds`` after this call.

        Raises:
            UserError: The step is earlier than the last step, or torch.load would reject the state.
        """
        self.used = True
        check_step_not_before("save", step, self.last_step)
        if not isinstance(state, Mapping):
            raise UserError(f"save: the state is a {type(state).__name__}; give a dict, such as {{'model': ...}}")
        new_types = list_types(state) - self.checked_types
        if new_types and (refused := find_unloadable_value(replace_tensors_by_empty(dict(state)))):
            raise UserError(
                f"save: torch.load(weights_only=True) rejects state[{refused[0]!r}]; use only tensors, Python "
                "numbers, strings, and lists and dicts of them"
            )
        self.checked_types |= new_types
        metrics = self.output_folder / METRICS
        metrics_bytes = metrics.stat().st_size if metrics.exists() else 0
        copied = Snapshot(0, step, metrics_bytes, copy_to_cpu(dict(state)))
        self.last_step, self.last_time = step, time.monotonic()
        self.hand_to_thread(copied)

    def save_last(self, seconds: float) -> int:
        """Request a save, wait until the function has saved, and return the newest checkpoint's step.

        Without a checkpoint, returns 0. Waits for up to 90 % of ``seconds``, or 8 s if the function never asks whether
        a save is due. Does not wait if the function has returned, or has neither saved, loaded nor asked. Then waits
        without a limit until a saved state is written. After this call no checkpoint is written.
        """
        limit = ANSWER_SHARE * seconds
        deadline = time.monotonic() + (limit if self.asked else min(limit, UNANNOUNCED_SECONDS))
        with self.changed:
            self.stop_requested, so_far = True, self.puts
            if self.used:
                is_saved = lambda: self.closed or self.handled > so_far  # noqa: E731
                self.changed.wait_for(is_saved, max(0.0, deadline - time.monotonic()))
        self.wait_until_written()
        self.reject_later_snapshots()  # because the caller reports this step as the step to resume after
        with self.write_lock:  # no file is being written
            return self.newest_step

    def load(self) -> State | None:
        """Wait until the last save is written, and load the newest checkpoint's state. Without a checkpoint, None.

        The tensors are on the CPU, and most are mapped from the file.
        """
        self.used = True
        self.wait_until_written()
        if self.newest is None:
            return None
        return load_state(self.newest) if self.link is None else self.load_state_from_link(self.newest, self.link)

    def load_state_from_link(self, found: Checkpoint, link: Path) -> State:
        """Create a hard link to the checkpoint, and return the state with tensors mapped from the link.

        The link stays until :meth:`close`. If links fail, returns a copy. Without a link, a file server may drop the
        file when another host replaces the file. Reading a mapped tensor is then fatal.
        """
        try:
            link.unlink(missing_ok=True)  # of an attempt that was killed
            os.link(found.path, link)
        except OSError:
            copied: State = copy_to_cpu(load_state(found))
            return copied
        return load_state(replace(found, path=link))

    def close(self) -> None:
        super().close()
        if self.link is not None:
            with suppress(OSError):
                self.link.unlink(missing_ok=True)


def list_types(value: Any) -> set[type]:
    inner = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    parts = inner if isinstance(inner, (list, tuple)) else ()
    return {type(value)}.union(*map(list_types, parts))


def replace_tensors_by_empty(value: Any) -> Any:
    """Return a copy of a value with an empty tensor in place of each tensor, for a quick trial save."""
    return map_state_leaves(value, lambda _: torch.empty(0), lambda other: other)


def check_step_not_before(what: str, step: int, last: int) -> None:
    """Raise UserError if ``step`` is not a whole number from 0 on, or is below the step ``last``.

    ``what`` names the called method in the error.
    """
    if type(step) is not int or step < 0:
        raise UserError(f"{what}: step={step!r}: must be the number of finished steps, a whole number of at least 0")
    if step < last:
        raise UserError(
            f"{what}: step {step:,} comes after step {last:,}, but steps must not decrease; continue from the step in "
            "the state that load() returns"
        )
