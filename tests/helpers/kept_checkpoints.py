"""Checkpoints in a blob store, as attempts of executions leave and find them."""

from __future__ import annotations

import time
from pathlib import Path

from flyte_ddp.pods.checkpoint_store import SAVED, CheckpointStore, parse_entry
from flyte_ddp.runs import checkpoint
from flyte_ddp.runs.arithmetic import Arithmetic
from flyte_ddp.runs.checkpoint import SLOTS, Identity

IDENTITY = Identity({"epochs": 1}, data="d", code="c", user_code="", initial_weights="", releases="torch 2")
ARITHMETIC = Arithmetic(1, "cpu", "fp32", 1, "off", "")


def write(path: Path, step: int, metrics: bytes = b"") -> Path:
    """A checkpoint, such as training leaves."""
    about = {"epoch": 0, "step": step, "trained_in": [vars(ARITHMETIC)], "time": time.time()}
    path.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.write(path, about, IDENTITY, metrics, lambda file: file.write(str(step).encode()))
    return path


def begun(store: CheckpointStore, folder: Path) -> int:
    """After which step an attempt goes on, whose ranks are then launched."""
    folder.mkdir(parents=True, exist_ok=True)
    found = store.begin(folder / SLOTS[0])
    step = found.step if found else 0
    store.started(step)
    assert found == checkpoint.newest_of(folder)
    return step


def names(base: Path, kind: str = SAVED) -> list[str]:
    """Execution, attempt and step of the files of a kind."""
    found = [entry for path in base.rglob("*") if (entry := parse_entry(str(path))) is not None and entry.kind == kind]
    return sorted(f"{entry.execution} {entry.attempt} {entry.step}" for entry in found)
