"""Runs that fail on purpose, with faults.py: what is trained, and what must be left of it."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes import children_of, living_with

from flyte_ddp import results
from flyte_ddp.config import Hyperparameters
from flyte_ddp.runs import checkpoint
from flyte_ddp.runs.run_folder import TRACEBACK, UNFINISHED

HP = Hyperparameters(
    model="faults:model", epochs=2, batch_size=100, num_ranks=2, precision="fp32", log_interval=1, max_steps=20
)

INTRODUCED = replace(HP, model="user_models:introduced")


def nothing_is_left(run: Path, temporary: Path) -> None:
    """No process of this one's or of theirs, no temporary file, no partial file, nothing that looks like a result."""
    assert children_of(os.getpid()) == []
    assert [command for command in living_with(str(temporary)) if "spawn_main" in command] == []
    assert [*temporary.iterdir()] == []
    nothing_like_a_result(run)


def nothing_like_a_result(run: Path) -> None:
    """Nothing but what tells why it failed, and where it may go on."""
    files = {path for path in run.rglob("*") if path.is_file() and results.FOLDER not in path.relative_to(run).parts}
    assert {path.name for path in files} <= {"metrics.jsonl", TRACEBACK, *checkpoint.SLOTS}
    assert [path.name for path in run.iterdir()] == [UNFINISHED]


def saved(run: Path) -> checkpoint.Checkpoint | None:
    """The newest checkpoint of a run that was cut off."""
    return checkpoint.newest_of(run / UNFINISHED / checkpoint.FOLDER)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "model.pt", weights_only=True)


def equal(here: Path, there: Path) -> bool:
    """Whether two runs ended in the same weights, to the last bit."""
    mine, other = weights(here), weights(there)
    return mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


def when(marker: Path, action: Callable[[], object]) -> threading.Thread:
    """Calls the action once the marker is there, which must not take long."""
    deadline = time.monotonic() + 60

    def wait() -> None:
        while not marker.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        action()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def in_spawned_processes(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> Path:
    """Has processes of the next run do this before their first function, which may fork others.

    Returns:
        The file that ``NOTED`` names in their environment.
    """
    site = folder / "site"
    site.mkdir()
    lines = "".join(f"    {line}\n" for line in code.splitlines())
    (site / "sitecustomize.py").write_text(
        "import multiprocessing.process, os, time\n"
        "run = multiprocessing.process.BaseProcess.run\n"
        f"def prepared(process):\n{lines}    run(process)\n"
        "multiprocessing.process.BaseProcess.run = prepared\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("NOTED", str(folder / "noted.txt"))
    return folder / "noted.txt"
