"""A cluster for the package's tasks, and what the first of them hands on."""

from collections.abc import Callable, Iterator

import packaged
import pytest
from engine_rules import resolved
from packaged import Package
from pod import Cluster, PodEnded
from pod_inputs import CHECK, SMOKE, VERSION, Inputs, check_inputs, from_console
from s3_server import s3_server


@pytest.fixture(scope="session")
def default(made: Callable[..., Package]) -> Package:
    """The package of somebody who chose no profile, but said whom to notify, and where results and models go."""
    stores = {"FLYTE_DDP_RESULTS": "s3://bucket/results", "FLYTE_DDP_REGISTRY": "s3://bucket/models"}
    wandb = {"WANDB_PROJECT": "digits", "WANDB_MODE": "online"}
    return made(FLYTE_DDP_NOTIFY="a@example.com, b@example.com", **stores, **wandb)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The project as it is here, but for the library's version, packaged for a cluster without GPUs."""
    folder = tmp_path_factory.mktemp("cluster")
    project = folder / "project"
    packaged.copy_project(project)
    (project / "flyte_ddp/__init__.py").write_text(f'__version__ = "{VERSION}"\n')
    environment = {"FLYTE_DDP_PROFILE": "sandbox", "WANDB_MODE": "offline"}
    ended, package = packaged.make(folder, "--copy", "all", directory=project, **environment)
    assert ended.exit_code == 0, ended.output
    (folder / "store/flyte").mkdir(parents=True)
    with s3_server(folder / "store") as server:
        yield Cluster(package, server, folder)


@pytest.fixture(scope="session")
def checked(cluster: Cluster) -> PodEnded:
    return cluster.run(CHECK, check_inputs(cluster, from_console(SMOKE)))


@pytest.fixture(scope="session")
def train_inputs(cluster: Cluster, checked: PodEnded) -> Inputs:
    assert checked.outputs, checked.log
    [check, train] = cluster.package.workflows["workflows.training.training_wf"].template.nodes
    return resolved(train.inputs, {check.id: checked.outputs})
