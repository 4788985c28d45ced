"""The launchers that one contract holds for, by the names that tests have for them."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest

Launch = Callable[..., None]
Run = Callable[..., Any]  # run_ranks in the folder of a test
LAUNCHERS = SPAWN, AGENTS, ELASTIC, DASK, RAY = "spawn", "agents that share nothing", "elastic", "dask", "ray"
FRESH = "spawn, forks without torch as on GPUs"
# A cluster reports nothing to anybody, and starts no workers, each a second of a core, before there are tasks for them.
RAY_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_prestart_worker_first_driver": "0"}


def on(*names: str, without: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Parametrize a test with these launchers; with all others, but for some, only in ``make test-all``."""
    others = [name for name in LAUNCHERS if name not in (*names, *without)]
    repeated = [pytest.param(name, marks=pytest.mark.exhaustive) for name in others]
    return pytest.mark.parametrize("launch", [*names, *repeated], indirect=True)


def set_environment(values: dict[str, str], folder: str) -> None:
    """Set environment and working directory; Dask's workers import this function by the name of this module."""
    os.environ.update(values)
    os.chdir(folder)
