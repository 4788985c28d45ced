"""Private parts of other libraries, which are really called: docs/design/private-parts.md lists them."""

import multiprocessing
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing import resource_tracker, util
from pathlib import Path
from threading import Thread
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from cli import ROOT
from flytekit import FlyteContextManager
from flytekit.bin.entrypoint import setup_execution
from flytekit.clients.friendly import SynchronousFlyteClient
from flytekit.clients.grpc_utils.deadline_interceptor import scoped_grpc_deadline
from flytekit.configuration import PlatformConfig
from flytekit.core.type_engine import TypeEngine
from flytekit.exceptions.user import FlyteTimeout
from flytekit.models.core.types import BlobType
from flytekit.models.literals import Blob, BlobMetadata, Literal, LiteralMap, Scalar
from flytekit.tools import script_mode
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile
from torch import nn

from flyte_ddp.core.errors import CollectiveError
from flyte_ddp.core.launch.supervise.failure_report import Cause, classify_error
from flyte_ddp.core.loops.in_rank import separate_group_stores, set_default_group_timeout
from flyte_ddp.core.machine.process import list_helper_pids, list_process_pools
from flyte_ddp.core.parallel import distributed
from flyte_ddp.export.graphs import NotExportedError, export_recurrent_layers_as_loops, silence_torch
from flytekitplugins.ddp.inputs import share_downloads
from tasks.command_line import exclude_virtual_environment
from tasks.flyte import flyte_task

HERE = "127.0.0.1"
pytestmark = pytest.mark.canary


def test_the_list_names_canaries_and_functions_that_are_there() -> None:
    rows = [line.split("|") for line in (ROOT / "docs/design/private-parts.md").read_text().splitlines() if "|" in line]
    assert len(rows) > 20
    folders = {3: ("flyte_ddp", "flytekitplugins", "tasks", "deploy"), 4: ("tests",)}
    for column, places in folders.items():
        code = "\n".join(path.read_text() for place in places for path in (ROOT / place).rglob("*.py"))
        defined = {*re.findall(r"(?:def|class) (\w+)", code)}
        named = {name for row in rows[2:] for name in re.findall(r"`(?:\w+\.)?(\w+)`", row[column])}
        assert named <= defined
        assert len(named) > 15


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_groups_that_meet_by_env_do_so_in_stores_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore(HERE, 0, 1, is_master=True, wait_for_workers=False, multi_tenant=True)
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": HERE, "MASTER_PORT": store.port}.items():
        monkeypatch.setenv(name, str(value))
    with separate_group_stores():
        first, second = (next(iter(dist.rendezvous("env://")))[0] for _ in range(2))
    first.set("address", "of the first group")
    assert first.check(["address"])
    assert not second.check(["address"])


def test_groups_wait_as_long_as_the_run() -> None:
    with set_default_group_timeout(77.0):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_waits_of_collectives_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bool:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist.Work, "wait", dist.Work.wait)  # and back, in the end
    monkeypatch.setattr(distributed, "TORCH_WAIT", fail)
    distributed.make_waits_raise_collective_errors()
    for collective in (lambda: dist.all_reduce(torch.ones(1)), dist.barrier):
        with pytest.raises(CollectiveError):
            collective()


@pytest.mark.usefixtures("group")
def test_a_hidden_group_is_none() -> None:
    with distributed.hide_process_group():
        assert not dist.is_initialized()
    assert dist.is_initialized()


def test_errors_of_gloo_are_known_by_their_text() -> None:
    """Here two ranks are threads, of which one does not come."""
    store, limit, made = dist.HashStore(), timedelta(seconds=0.2), dict[int, Any]()
    make = [
        Thread(target=lambda rank=rank: made.update({rank: dist.ProcessGroupGloo(store, rank, 2, limit)}))
        for rank in (0, 1)
    ]
    for thread in make:
        thread.start()
    for thread in make:
        thread.join()
    with pytest.raises(RuntimeError) as caught:
        made[0].allreduce([torch.ones(1)]).wait()
    assert classify_error(caught.value) is Cause.TIMEOUT


@pytest.mark.canary
def test_pythons_own_helper_is_spared() -> None:
    resource_tracker.ensure_running()
    assert len(list_helper_pids()) == 1


@pytest.mark.canary
def test_a_pool_of_processes_is_found_until_it_is_terminated() -> None:
    """Also if another library has registered a call that belongs to no object."""
    without_owner = util.Finalize(None, print, exitpriority=0)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert list_process_pools() == [pool]
        pool.apply(int)  # terminated before its worker has begun, a pool may wait for ever
    assert list_process_pools() == []
    without_owner.cancel()


MAIN = """
import sys
print(__name__, flush=True)
if __name__ == "__main__":
    from flyte_ddp.core.machine.process import open_spawn_context
    with open_spawn_context() as context:
        process = context.Process(target=print, args=("child",))
        process.start()
    process.join()
"""


@pytest.mark.cold
def test_spawned_processes_do_not_run_the_main_script_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(MAIN)
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.split() == ["__main__", "child"]


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, 3, batch_first=True)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.gru(values)[0]


@pytest.mark.slow
def test_recurrent_layers_are_exported_for_any_length() -> None:
    model, example = Reader().eval(), torch.randn(2, 5, 2)
    with silence_torch(), torch.no_grad(), export_recurrent_layers_as_loops(model):
        sizes = ({1: torch.export.Dim("length", min=2)},)
        program = torch.export.export(model, (example,), dynamic_shapes=sizes)
    longer = torch.randn(2, 11, 2)
    torch.testing.assert_close(program.module()(longer), model(longer))


def test_without_torchs_patches_only_recurrent_layers_are_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the exports of all models would have vanished."""
    monkeypatch.setitem(sys.modules, "torch.export._patches", None)
    monkeypatch.delattr(torch.export, "_patches", raising=False)
    with export_recurrent_layers_as_loops(nn.Linear(1, 1)):
        pass
    with pytest.raises(NotExportedError, match="LSTM and GRU for one length only"):
        export_recurrent_layers_as_loops(Reader()).__enter__()


def of_blob(form: int, address: str) -> Literal:
    """What a task gets for a file or folder of a blob store."""
    return Literal(Scalar(blob=Blob(BlobMetadata(BlobType("", form)), address)))


@pytest.mark.parametrize(("kind", "form"), [(FlyteFile, 0), (FlyteDirectory, 1)])
def test_flytekits_downloads_go_through_ours(tmp_path: Path, kind: Any, form: int) -> None:
    stored = f"/{tmp_path.name}/folder"
    fsspec.filesystem("memory").pipe(f"{stored}/a", b"content")
    source = "memory:/" + (stored if form else f"{stored}/a")
    value = TypeEngine.to_python_value(FlyteContextManager.current_context(), of_blob(form, source), kind)
    share_downloads({"data": value})
    path = Path(os.fspath(value))
    assert (path / "a" if form else path).read_text() == "content"
    assert path.with_name(f".{path.name}.lock").read_bytes() == b"complete"


@pytest.mark.parametrize("nodes", [1, 2, "2:3"])
def test_elastics_task_is_what_the_plugin_makes_of_it(nodes: int | str) -> None:
    kfpytorch = pytest.importorskip("flytekitplugins.kfpytorch.task")
    from flytekitplugins.ddp.elastic import ReplacedPodsTask, make_elastic_options

    def function(x: int) -> int:
        return x

    config = kfpytorch.Elastic(**make_elastic_options(2, 2, 1) | {"nnodes": nodes})
    plugins, ours = (vars(kind(config, function)) for kind in (kfpytorch.PytorchElasticFunctionTask, ReplacedPodsTask))
    assert plugins.keys() == ours.keys()
    for name, value in plugins.items():
        if isinstance(value, (int, str, kfpytorch.Elastic)):
            assert ours[name] == value


def test_flytekit_does_not_look_into_the_virtual_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here.py", ".venv/lib/there.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(script_mode, "EXCLUDE_DIRS", set())
    assert len(script_mode.list_all_files(str(tmp_path), False)) == 2
    exclude_virtual_environment()
    assert script_mode.list_all_files(str(tmp_path), False) == [str(tmp_path / "here.py")]


@pytest.mark.filterwarnings("ignore:`disable_deck`:DeprecationWarning")
def test_flytekit_calls_the_dispatch_that_we_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flytekit.bin import entrypoint

    @flyte_task()
    def made(x: int) -> int:
        return x

    called: list[LiteralMap] = []
    monkeypatch.setattr(made, "dispatch_execute", lambda _, literals: called.append(literals) or LiteralMap({}))
    given = LiteralMap({"x": TypeEngine.to_literal(FlyteContextManager.current_context(), 3, int, None)})
    (tmp_path / "inputs.pb").write_bytes(given.to_flyte_idl().SerializeToString())
    with setup_execution(str(tmp_path / "raw"), str(tmp_path / "out")) as context:
        entrypoint._dispatch_execute(context, lambda: made, str(tmp_path / "inputs.pb"), str(tmp_path / "out"))
    assert [each.literals["x"].scalar.primitive.integer for each in called] == [3]


def test_a_call_to_a_cluster_has_a_limit() -> None:
    """Of a server that accepts connections, and never answers."""
    with socket.create_server((HERE, 0)) as server, scoped_grpc_deadline(0.3):
        config = PlatformConfig(endpoint=f"{HERE}:{server.getsockname()[1]}", insecure=True)
        with pytest.raises(FlyteTimeout, match="DEADLINE_EXCEEDED"):
            SynchronousFlyteClient(config).list_projects_paginated(limit=1)
