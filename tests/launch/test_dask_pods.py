"""Dask as Flyte's plugin and the operator start it: by the image's commands, on hosts that have no copy of this."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import distributed
import pytest
from image import make_commands
from mounts import ALONE, need_mounts

from flyte_ddp.core.errors import UnreachableError, UserError
from flyte_ddp.core.machine.resources import Request
from flyte_ddp.engines import dask

pytestmark = pytest.mark.usefixtures("temporary")

ROOT = Path(__file__).parents[2]
WITHOUT_LIBRARY = f"import sys; sys.path[:] = [path for path in sys.path if path != {str(ROOT)!r}]"
WORKER = ("dask-worker", "--name", "one", "--nthreads", "2", "--memory-limit", "2Gi")  # as in the plugin's dask.go
OWN_FUNCTION = """
import flyte_ddp
from of_this_project import name

def describe():
    return name, flyte_ddp.__file__
"""
RUN = """
import mine
from flyte_ddp import run_ranks
from flyte_ddp.engines import dask

print(*run_ranks(mine.describe, num_ranks=1, launch=dask.launch))
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the Dockerfile adds for Flyte's plugin, made in another folder than the image's."""
    folder = tmp_path_factory.mktemp("commands")
    make_commands(folder)
    return folder


@pytest.fixture
def start(commands: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts one of them; what it says is in ``stderr.txt`` of its folder."""
    with ExitStack() as stack:

        def run(name: str, *arguments: str, prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
            folder = tmp_path / f"process-{len(list(tmp_path.glob('process-*')))}"
            folder.mkdir()
            log = stack.enter_context((folder / "stderr.txt").open("w"))
            variables = {**os.environ, "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
            command = [*prefix, commands / name, *arguments]
            process = subprocess.Popen(command, cwd=folder, env=variables, stderr=log, text=True)
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
            return process

        yield run


@pytest.fixture
def scheduler(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> subprocess.Popen[str]:
    """Without workers, for all of a test to connect to; it takes another port if its own is taken."""
    process, log = start("dask-scheduler"), tmp_path / "process-0/stderr.txt"
    while not (found := re.search(r"Scheduler at: +(tcp://\S+)", log.read_text())):
        assert process.poll() is None, log.read_text()
    monkeypatch.setenv(dask.SCHEDULER, found[1])
    return process


@pytest.fixture
def client(scheduler: subprocess.Popen[str]) -> Iterator[distributed.Client]:
    with distributed.Client(os.environ[dask.SCHEDULER]) as connected:
        yield connected


@pytest.mark.slow
def test_a_scheduler_that_has_died(scheduler: subprocess.Popen[str]) -> None:
    """Whatever asks it says so, also when Dask has closed the client, which it does in some time."""
    words = r"the Dask cluster does not answer .*; run again later"
    with distributed.Client(os.environ[dask.SCHEDULER], timeout=1) as client:
        scheduler.kill()
        with pytest.raises(UnreachableError, match=words):
            dask.read_workers(client)
    with pytest.raises(UnreachableError, match=words):
        dask.read_workers(client)


@pytest.mark.slow
def test_a_run_sends_its_sources_to_workers_that_have_none(client: distributed.Client, start: Start, tmp_path) -> None:
    """The library, and a function that imports a module, of its own; nothing of them stays on the workers.

    Flyte's plugin starts them so. On a cluster that is made for a run, fewer workers than ranks are an error.
    """

    def library() -> object:
        import importlib.util

        return importlib.util.find_spec("flyte_ddp")

    project = tmp_path / "project"
    project.mkdir()
    need_mounts(project)
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(WITHOUT_LIBRARY)
    no_library = ("env", f"PYTHONPATH={tmp_path / 'site'}")
    start(*WORKER, prefix=(*no_library, *ALONE, "sh", "-c", f'mount -t tmpfs none "{project}" && exec "$@"', "sh"))
    client.wait_for_workers(1, timeout=60)
    [worker] = dask.read_workers(client).values()
    assert (worker["name"], worker["nthreads"], worker["memory_limit"]) == ("one", 2, 2 * 2**30)
    with pytest.raises(UserError, match="num_ranks=3: the Dask cluster has 2 workers, and each rank needs one"):
        dask.plan_world(Request(3), client, 300.0, awaited_hosts=2)
    with pytest.raises(UnreachableError, match="1 of 2 workers of the Dask cluster"):
        dask.plan_world(Request(2), client, 0.0, awaited_hosts=2)
    assert [*client.run(library).values()] == [None]
    shutil.copytree(ROOT / "flyte_ddp", project / "flyte_ddp", ignore=shutil.ignore_patterns("__pycache__"))
    (project / "mine.py").write_text(OWN_FUNCTION)
    (project / "of_this_project.py").write_text("name = 'mine'")
    command, environment = [sys.executable, "-c", RUN], {**os.environ, "PYTHONPATH": str(project)}
    ended = subprocess.run(command, cwd=project, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    name, file = ended.stdout.split()
    assert name == "mine"
    assert "/flyte-ddp-sources-" in file
    assert [*client.run(library).values()] == [None]
    assert not [*tmp_path.rglob("flyte-ddp-sources-*")]


def test_a_worker_of_another_version() -> None:
    """By what Dask finds out about its processes."""
    ours = {"packages": {"python": "3.12.1.final.0", "torch": "2.9.0", "torchvision": "0.24.0"}}
    theirs = {"packages": {**ours["packages"], "python": "3.11.9.final.0"}}
    found = {"client": ours, "workers": {"tcp://a:1": ours, "tcp://b:1": theirs}}
    cluster = SimpleNamespace(scheduler=None, get_versions=lambda **_: found)
    dask.refuse_version_mismatch(cluster, ["tcp://a:1"])
    words = "Dask worker tcp://b:1 has python 3.11.9.*, but this process has 3.12.1"
    with pytest.raises(UserError, match=words):
        dask.refuse_version_mismatch(cluster, ["tcp://a:1", "tcp://b:1"])
