"""What listens to the network while ranks run on this machine: nothing."""

import os
from collections.abc import Callable

import pytest
from open_ports import list_new_ports, list_open_ports

from flyte_ddp import run_ranks
from flyte_ddp.core.launch import spawn
from flyte_ddp.engines import dask, elastic

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("launch", [elastic.launch, dask.launch, spawn.launch])
@pytest.mark.usefixtures("no_current_client")
def test_nobody_else_can_connect(launch: Callable[..., None]) -> None:
    """Elastic's and torch's stores and Dask's dashboard have no password."""
    before = list_open_ports(os.getpid())  # of other tests
    assert run_ranks(list_new_ports, os.getpid(), before, launch=launch, num_ranks=2) == []
