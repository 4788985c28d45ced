"""The names of the launchers, which all fulfil the same contract, in tests."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest

Launch = Callable[..., None]
Run = Callable[..., Any]  # run_ranks in the folder of a test
LAUNCHERS = SPAWN, AGENTS, ELASTIC, DASK, RAY = "spawn", "agents that share nothing", "elastic", "dask", "ray"
FRESH = "spawn, forks without torch as on GPUs"
# A cluster reports no statistics, and starts workers (each takes a second of a core) only when tasks need them.
RAY_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_prestart_worker_first_driver": "0"}


def on(*names: str, without: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Parametrize a test with these launchers, and in ``make test-all`` with all others except ``without``."""
    others = [name for name in LAUNCHERS if name not in (*names, *without)]
    repeated = [pytest.param(name, marks=pytest.mark.exhaustive) for name in others]
    return pytest.mark.parametrize("launch", [*names, *repeated], indirect=True)


def set_environment(values: dict[str, str], folder: str) -> None:
    """Set environment and working directory. Dask's workers import this function from this module."""
    os.environ.update(values)
    os.chdir(folder)
