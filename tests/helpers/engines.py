"""The launchers that one contract holds for, by the names that tests have for them."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

Launch = Callable[..., None]
SPAWN, AGENTS, ELASTIC, DASK, RAY = "spawn", "agents that share nothing", "elastic", "dask", "ray"
FRESH = "spawn, fresh interpreters as on GPUs"


def on(*names: str) -> pytest.MarkDecorator:
    """Runs a test on these."""
    return pytest.mark.parametrize("launch", names, indirect=True)


everywhere = on(SPAWN, FRESH, AGENTS, ELASTIC, DASK, RAY)
engines = on(SPAWN, ELASTIC, DASK, RAY)  # where it is the agents' part, Dask's and Ray's are those


def set_environment(values: dict[str, str], folder: str) -> None:
    """For Dask's workers, which know this module by its name; there are several of the name conftest."""
    os.environ.update(values)
    os.chdir(folder)
