"""A user's own project, run locally, and packaged for a cluster."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import packaged
import pytest
from cli import ROOT, Ended, pyflyte
from pod import Cluster
from s3_server import s3_server

PROJECT = Path(__file__).parent / "project"
Run = Callable[..., Ended]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run ``pyflyte run own.py TASK OPTIONS`` from another folder than the project's."""
    project = shutil.copytree(PROJECT, tmp_path / "project")
    (tmp_path / "elsewhere").mkdir()

    def run_task(*arguments: str, **environment: str) -> Ended:
        command = ("run", str(project / "own.py"), *arguments)
        places = {"home": tmp_path / "home", "runs": tmp_path / "runs", "directory": tmp_path / "elsewhere"}
        return pyflyte(*command, **places, **environment)

    return run_task


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The user's project with the library's sources in it, packaged."""
    folder = tmp_path_factory.mktemp("cluster")
    project = shutil.copytree(PROJECT, folder / "project")
    for name in ("flyte_ddp", "flytekitplugins"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    ended, package = packaged.make(folder, "--copy", "all", pkgs="own", directory=project)
    assert ended.exit_code == 0, ended.output
    (folder / "store/flyte").mkdir(parents=True)
    with s3_server(folder / "store") as server:
        yield Cluster(package, server, folder)
