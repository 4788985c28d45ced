"""Fixtures: launchers with the same signature, on clusters of real processes that run for the whole session."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import agents
import pytest
from cli import HELPERS
from engines import AGENTS, DASK, ELASTIC, FRESH, RAY_ENVIRONMENT, SPAWN, Launch, set_environment

from flyte_ddp.core.launch import spawn
from flyte_ddp.core.launch.supervise import rank_starter
from flyte_ddp.core.runs.work import Work
from flyte_ddp.engines import elastic

PASSED_ON = ("FAULTS", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR")
RAY_HEAD = """
import sys, ray
context = ray.init(num_cpus=4, include_dashboard=False, _temp_dir=sys.argv[1], object_store_memory=100_000_000)
print(context.address_info["address"], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def dask_client() -> Iterator[object]:
    """Yield a client of a Dask cluster with four workers."""
    import distributed

    options = {"n_workers": 4, "threads_per_worker": 1, "dashboard_address": ":0", "host": "127.0.0.1"}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TMPDIR", raising=False)  # identifies the processes of a test
        started = distributed.LocalCluster(**options)
    with started as cluster, distributed.Client(cluster, set_as_default=False) as client:
        yield client


@pytest.fixture
def no_current_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide Dask's current client, also a client of another test that could not connect and is not collected yet."""
    import distributed

    def default_client() -> None:
        raise ValueError("no clients found")

    monkeypatch.setattr(distributed, "default_client", default_client)


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """Yield the address of a Ray cluster with room for four ranks. The cluster ends with its head's standard input."""
    environment = {**os.environ, **RAY_ENVIRONMENT}
    environment.pop("TMPDIR", None)
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as short:  # for sockets
        command = [sys.executable, "-c", RAY_HEAD, short]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, env=environment, text=True, **pipes) as head:
            address = head.stdout.readline().strip()
            assert address, "Ray's head has not started"
            yield address
            import ray

            ray.shutdown()


@pytest.fixture
def launch(
    request: pytest.FixtureRequest,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> Launch:
    """Return the launcher that the test's parameter names. Ranks have the test's environment."""
    here = {SPAWN: spawn, FRESH: spawn, AGENTS: agents, ELASTIC: elastic}
    if request.param == FRESH:
        monkeypatch.setattr(rank_starter, "PRELOADED_DEVICE_TYPES", ())
    if request.param in here:
        return here[request.param].launch
    if request.param == DASK:
        return on_dask(request.getfixturevalue("dask_client"))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    return on_ray(request.getfixturevalue("ray_address"), tmp_path_factory.getbasetemp() / "ray_environment.json")


def passed_on() -> dict[str, str]:
    """Return the part of the test's environment that ranks must have."""
    return {name: os.environ.get(name, "{}") for name in PASSED_ON}


def on_dask(client: object) -> Launch:
    from flyte_ddp.engines import dask

    def run(work: Work, **options: object) -> None:
        client.run(set_environment, passed_on(), str(Path.cwd()))
        dask.launch(work, client=client, **options)

    return run


def on_ray(address: str, file: Path) -> Launch:
    """Return a launcher that connects to Ray on the first use, once for all tests.

    A new connection would start new workers. The workers' environment therefore stays the same. A file contains the
    test's environment, which agents and ranks read when they start (worker_site/sitecustomize.py).
    """
    import ray

    from flyte_ddp.engines import ray as launcher

    connecting = threading.Lock()

    def run(work: Work, **options: object) -> None:
        with connecting:
            file.write_text(json.dumps(passed_on()))
            if not ray.is_initialized():
                handler = signal.getsignal(signal.SIGTERM)
                site = f"{HELPERS / 'worker_site'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
                variables = {"RANKS_ENVIRONMENT": str(file), "PYTHONPATH": site}
                ray.init(address, runtime_env={"env_vars": variables}, log_to_driver=False)
                if threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGTERM, handler)
        launcher.launch(work, **options)

    return run
