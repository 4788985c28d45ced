"""A user's function on ranks, in a folder of the test, and what must not stay of it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import Run
from faulty_runs import state_of_process
from launchers import dask_client, launch, no_current_client, ray_address  # noqa: F401 (fixtures)
from processes import children_of, processes_with

from flyte_ddp import run_ranks


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
