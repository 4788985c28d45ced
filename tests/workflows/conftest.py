"""A cluster for the package's tasks, and what the first of them hands on."""

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import packaged
import pytest
from cli import ROOT, Ended
from engine_rules import resolved
from packaged import Package
from pod import Cluster, PodEnded
from pod_inputs import CHECK, SMOKE, VERSION, Inputs, check_inputs, from_console
from s3_server import s3_server

from tasks.command_line import show_errors_in_panels


def package_a_fork(folder: Path) -> Ended:
    """Package a fork for a cluster without GPUs; its schedules and its library's version are its own."""
    project = folder / "project"
    packaged.copy_project(project)
    (project / "flyte_ddp/core/user_code/version.py").write_text(f'VERSION = "{VERSION}"\n')
    (project / "config/mine.json").write_text('{"epochs": 7}')
    (project / "config/schedules.yaml").write_text(
        """
        - {name: hourly, workflow: retraining_wf, cron: "7 * * * *", hyperparameters: config/mine.json}
        - {name: best, workflow: release_wf, cron: "0 1 * * 1-5", model_name: pets, policy: {rule: not_worse}}
        """
    )
    environment = {"FLYTE_DDP_PROFILE": "sandbox", "FLYTE_DDP_RESULTS": "/a/folder", "WANDB_MODE": "offline"}
    return packaged.make(folder, "--copy", "all", directory=project, **environment)[0]


@pytest.fixture(scope="session")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return packaged.make_shared(tmp_path_factory, "fork", package_a_fork)


@pytest.fixture(scope="session")
def cluster(sandbox: Package, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "store/flyte").mkdir(parents=True)
    with s3_server(folder / "store") as server:
        yield Cluster(sandbox, server, folder)


@pytest.fixture(scope="session")
def checked(cluster: Cluster) -> PodEnded:
    return cluster.run(CHECK, check_inputs(cluster, from_console(SMOKE)))


@pytest.fixture(scope="session")
def train_inputs(cluster: Cluster, checked: PodEnded) -> Inputs:
    assert checked.outputs, checked.log
    [check, train] = cluster.package.workflows["workflows.training.training_wf"].template.nodes
    return resolved(train.inputs, {check.id: checked.outputs})


@pytest.fixture
def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Call ``pyflyte run`` of this process in an empty folder; return the text of its panel."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import's, of rich_click's version
        from flytekit.clis.sdk_in_container.run import run

    def run_and_fail(file: str, name: str, *arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("FLYTE_DDP_RUNS", os.environ.get("FLYTE_DDP_RUNS", str(tmp_path / "runs")))
        words = [str(ROOT / f"workflows/{file}.py"), name, *arguments]
        monkeypatch.setattr("sys.argv", ["pyflyte", "run", *words])
        with pytest.raises(click.ClickException) as raised, show_errors_in_panels(click.Context(run)):
            run(words, standalone_mode=False)
        return raised.value.format_message()

    gc.disable()  # flytekit leaves a temporary folder to the collection, which warns: only the one below may find it
    try:
        yield run_and_fail
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gc.collect()
    finally:
        gc.enable()
