"""The states that a user's function saves. Rank 0 writes them, in a thread of its own, to two files in turn."""

import copy
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flyte_ddp.device_copy import copy_to_cpu
from flyte_ddp.errors import UserError
from flyte_ddp.models.zoo import find_refused_value
from flyte_ddp.runs import checkpoint
from flyte_ddp.runs.checkpoint import Checkpoint, Identity
from flyte_ddp.runs.run_folder import METRICS

UNANNOUNCED_SECONDS = 8.0  # for the next save after a request to stop, if the function never asks whether one is due
ANSWER_SHARE = 0.9  # of the time for the next save: the launcher must get the answer before the time is over


@dataclass(frozen=True)
class State:
    """A copy of a state that is to be written."""

    step: int
    values: dict[str, Any]
    metrics_bytes: int  # of metrics.jsonl
    number: int  # of the call of save


class Checkpoints:
    """Saves and loads states in ``folder/checkpoints``; call :meth:`close` when the function has ended.

    ``found`` is the checkpoint that the function begins with. A save is due ``seconds`` after the last one (0: never),
    and after a request to stop.
    """

    def __init__(self, folder: Path, identity: Identity, found: Checkpoint | None, seconds: float) -> None:
        self.folder, self.identity, self.newest, self.seconds = folder, identity, found, seconds
        self.slots = checkpoint.alternate_slots(folder / checkpoint.FOLDER, found.path if found else None)
        self.slot = next(self.slots)  # the older of the two files
        self.last_step = found.step if found else 0  # that save got
        self.last_time = time.monotonic()
        self.saves = self.written = 0  # calls of save, and the number of the one that was written last
        self.checked_types: set[type] = set()  # that torch.load takes
        self.changed = threading.Condition()  # for the attributes below, newest and written
        self.pending: State | None = None
        self.asked = self.used = self.stop_requested = self.writing = self.closed = self.failure_printed = False
        self.thread = threading.Thread(target=self._write_until_closed, name="checkpoints", daemon=True)

    def due(self) -> bool:
        self.asked = self.used = True
        return self.stop_requested or 0 < self.seconds <= time.monotonic() - self.last_time

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Copy a state to the CPU for the thread to write; the copy replaces one that is not written yet."""
        self.used = True
        check_step("save", step, self.last_step)
        if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
            what = f"a {type(state).__name__}" + (" with other keys" if isinstance(state, Mapping) else "")
            raise UserError(f"save: the state is {what}; give a dict with texts as keys, such as {{'model': ...}}")
        new_types = find_types(state) - self.checked_types
        if new_types and (refused := find_refused_place(empty_tensors(dict(state)))):
            raise UserError(
                f"save: torch.load(weights_only=True) refuses {refused[0]}, of type "
                f"{type(refused[1]).__name__}; give tensors, Python's own numbers, texts, and lists and dicts of them"
            )
        self.checked_types |= new_types
        metrics = self.folder / METRICS
        metrics_bytes = metrics.stat().st_size if metrics.exists() else 0
        copied = State(step, copy_to_cpu(dict(state)), metrics_bytes, self.saves + 1)
        self.last_step, self.last_time = step, time.monotonic()
        with self.changed:
            self.pending, self.saves = copied, copied.number
            self.changed.notify_all()
        if self.thread.ident is None:
            self.thread.start()

    def save_now(self, seconds: float) -> int:
        """Make a save due, wait for the function to save, and return the newest checkpoint's step, 0 if there is none.

        Waits for 90 % of ``seconds``, but 8 s at most if the function never asks whether a save is due. Does not wait
        if it has neither saved, loaded nor asked, or has returned. No checkpoint is written after this call.
        """
        limit = ANSWER_SHARE * seconds
        deadline = time.monotonic() + (limit if self.asked else min(limit, UNANNOUNCED_SECONDS))
        with self.changed:
            self.stop_requested, so_far = True, self.saves
            if self.used:
                is_saved = lambda: self.closed or self.written > so_far  # noqa: E731
                self.changed.wait_for(is_saved, max(0.0, deadline - time.monotonic()))
            self.closed = True  # because the caller reports this step as the one to resume after
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self.writing, max(0.0, deadline - time.monotonic()))
            return self.newest.step if self.newest else 0

    def load(self) -> dict[str, Any] | None:
        self.used = True
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self.pending is None)
        return read_state(self.newest)

    def close(self) -> None:
        """Write the waiting copy, and end the thread."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self.pending is None)
            self.closed = True
            self.changed.notify_all()
        if self.thread.ident is not None:
            self.thread.join()

    def _write_until_closed(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.closed or self.pending is not None)
                if self.closed:
                    return
                state = self.pending
                assert state is not None
                self.writing = True
            written = None
            try:
                written = self._write(state)
            except Exception as error:
                if not self.failure_printed:
                    print(
                        f"checkpoint could not be written: {error}; the function goes on", file=sys.stderr, flush=True
                    )
                self.failure_printed = True
            with self.changed:
                self.writing = False
                if written is not None:
                    self.newest, self.written = written, state.number
                if self.pending is state:
                    self.pending = None
                self.changed.notify_all()

    def _write(self, state: State) -> Checkpoint | None:
        path, metrics = self.slot, self.folder / METRICS
        with metrics.open("rb") as file:
            content = file.read(state.metrics_bytes)
        description = {"epoch": 0, "step": state.step, "trained_in": [], "time": time.time()}
        checkpoint.write_checkpoint(
            path, description, self.identity, content, lambda file: torch.save(state.values, file)
        )
        self.slot = next(self.slots)
        return checkpoint.read_checkpoint(path)


def read_state(found: Checkpoint | None) -> dict[str, Any] | None:
    if found is None:
        return None
    state: dict[str, Any] = torch.load(checkpoint.read_saved_state(found), map_location="cpu", weights_only=True)
    return state


def find_types(value: Any) -> set[type]:
    inner = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    parts = inner if isinstance(inner, (list, tuple)) else ()
    return {type(value)}.union(*map(find_types, parts))


def find_refused_place(state: Mapping[str, Any]) -> tuple[str, object] | None:
    """Return place and value of the innermost part that torch.load refuses, such as ``state['a'][0]``, or None."""
    place: str = "state"
    part: Any = state
    while isinstance(part, (Mapping, list, tuple)):
        items: Mapping[Any, Any] = part if isinstance(part, Mapping) else dict(enumerate(part))
        if (refused := find_refused_value(items)) is None:
            break
        place, part = f"{place}[{refused[0]!r}]", refused[1]
    return None if part is state else (place, part)


def empty_tensors(value: Any) -> Any:
    """Return a copy of a value in which an empty tensor replaces each tensor: torch.save need not write their data."""
    if isinstance(value, Tensor):
        return torch.empty(0)
    if type(value) in (dict, OrderedDict):
        result = copy.copy(value)  # with ``_metadata``
        result.update({key: empty_tensors(item) for key, item in value.items()})
        return result
    return type(value)(map(empty_tensors, value)) if type(value) in (list, tuple) else value


def check_step(what: str, step: int, last: int) -> None:
    if type(step) is not int or step < 0:
        raise UserError(f"{what}: step={step!r} must be a whole number from 0 on: the steps that are done")
    if step < last:
        raise UserError(
            f"{what}: step {step:,} comes after step {last:,}, and steps must not go back; count on from the step in "
            "the state that load() returns"
        )
