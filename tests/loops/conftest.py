"""A user's function on ranks, in a folder of the test, and what must not stay of it."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import Run
from launchers import dask_client, launch, no_current_client, ray_address  # noqa: F401 (fixtures)
from processes import children_of, processes_with
from torch.distributed import distributed_c10d

from flyte_ddp import run_ranks
from flyte_ddp.loops import current_rank


def state_of_process() -> dict[str, object]:
    """Return what a run must leave as it is in the launching process."""
    # Those of the tests, of Ray, where we connect, and of joblib, when it is imported.
    other = {"PYTEST_CURRENT_TEST", "RAY_CLIENT_MODE", "PYTHONBREAKPOINT", "KMP_INIT_AT_FORK", "FLYTE_DDP_SAVE_SECONDS"}
    return {
        "environment": {name: os.environ[name] for name in os.environ.keys() - other},
        "folder": Path.cwd(),
        "handlers": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)],
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "random": torch.get_rng_state().tolist(),
        "limit": distributed_c10d.default_pg_timeout,
        "group": dist.is_initialized(),
        "rank": current_rank._current,
    }


@pytest.fixture
def run(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Call run_ranks in the folder ``run``, within seconds; nothing else stays of it."""
    monkeypatch.setenv("FLYTE_DDP_PROGRESS", "off")
    before = state_of_process()

    def run_in_folder(function: Any, *args: Any, folder: Path | None = tmp_path / "run", **options: Any) -> Any:
        return run_ranks(function, *args, folder=folder, **options)

    yield run_in_folder
    assert state_of_process() == before
    assert [command for command in children_of(os.getpid()) if "flyte_ddp" in command or "spawn_main" in command] == []
    commands = processes_with(str(temporary)).values()
    assert [command for command in commands if "flyte_ddp" in command or "spawn_main" in command] == []
    assert [*temporary.glob("flyte-ddp*")] == []
