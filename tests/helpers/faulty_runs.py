"""Runs that fail on purpose, with faults.py: the training, and checks of the remains."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import children_of, processes_with, wait_until
from torch.distributed import distributed_c10d

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core import results
from flyte_ddp.core.loops import current_rank
from flyte_ddp.core.runs import checkpoint
from flyte_ddp.core.runs.run_folder import TRACEBACK, UNFINISHED

HP = Hyperparameters(
    model="faults:model", epochs=2, batch_size=100, num_ranks=2, precision="fp32", log_interval=1, max_steps=20
)

INTRODUCED = replace(HP, model="user_models:introduced")


def state_of_process() -> dict[str, object]:
    """Return the state of the launching process that a run must not change."""
    # Those of the tests, of Ray, where we connect, and of joblib, when it is imported.
    other = {"PYTEST_CURRENT_TEST", "FAULTS", "FLYTE_DDP_SAVE_SECONDS"}
    other |= {"RAY_CLIENT_MODE", "PYTHONBREAKPOINT", "KMP_INIT_AT_FORK"}
    return {
        "environment": {name: os.environ[name] for name in os.environ.keys() - other},
        "folder": (Path.cwd(), [*sys.path]),
        "handlers": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)],
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "random": torch.get_rng_state().tolist(),
        "limit": distributed_c10d.default_pg_timeout,
        "group": dist.is_initialized(),
        "rank": current_rank._current,
        "logs": logging.getLogger("torch.distributed.elastic").level,
    }


def nothing_is_left(run: Path, temporary: Path) -> None:
    """Assert that a run has left no process, no temporary file and no file that looks like a result."""
    assert children_of(os.getpid()) == []
    assert [command for command in processes_with(str(temporary)).values() if "spawn_main" in command] == []
    assert [*temporary.iterdir()] == []
    nothing_like_a_result(run)


def nothing_like_a_result(run: Path) -> None:
    """Assert that a run folder contains only metrics, the traceback and checkpoints."""
    files = {path for path in run.rglob("*") if path.is_file() and results.FOLDER not in path.relative_to(run).parts}
    assert {path.name for path in files} <= {"metrics.jsonl", TRACEBACK, *checkpoint.SLOTS}
    assert [path.name for path in run.iterdir()] == [UNFINISHED]


def saved(run: Path) -> checkpoint.Checkpoint | None:
    """Return the newest checkpoint of an interrupted run, or None without a checkpoint."""
    return checkpoint.find_newest_checkpoint(run / UNFINISHED / checkpoint.FOLDER)[0]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "model.pt", weights_only=True)


def equal(here: Path, there: Path) -> bool:
    """Return whether the weights of two runs are equal to the last bit."""
    mine, other = weights(here), weights(there)
    return mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


def when(marker: Path, action: Callable[[], object]) -> threading.Thread:
    """Call the action in a thread once the marker exists, within 60 s. Return the thread."""

    def wait() -> None:
        wait_until(marker.exists)
        action()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def in_spawned_processes(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> Path:
    """Make processes of the next run execute this code before the first function, which may fork processes.

    Returns:
        The file in the variable NOTED of the processes' environment.
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
