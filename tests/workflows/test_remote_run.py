"""``pyflyte run --remote`` as one types it, against a Flyte that takes everything and remembers it."""

from collections.abc import Iterator
from pathlib import Path

import packaged
import pytest
import yaml
from cli import ROOT, WORKFLOWS, Ended, pyflyte
from fake_flyte_admin import FakeFlyteAdmin, fake_flyte_admin

pytestmark = pytest.mark.slow


def run(admin: FakeFlyteAdmin, folder: Path, *options: str, **environment: str) -> Ended:
    config = yaml.safe_load((ROOT / "deploy/sandbox.yaml").read_text())
    config["admin"]["endpoint"] = admin.endpoint
    (folder / "cluster.yaml").write_text(yaml.safe_dump(config))
    command = ["--config", str(folder / "cluster.yaml"), "run", "--remote", "--image", "flyte-ddp:1", *options]
    return pyflyte(*command, WORKFLOWS, "training_wf", "--hp", '{"epochs": 3}', home=folder / "home", **environment)


@pytest.fixture(scope="module")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeFlyteAdmin]:
    """A Flyte to which the command was given twice: at first, and with other settings to train again."""
    folder = tmp_path_factory.mktemp("remote")
    with fake_flyte_admin() as running:
        for options, environment in (
            ((), {}),
            (("--overwrite-cache",), {"FLYTE_DDP_RUNS": "elsewhere", "WANDB_PROJECT": "another"}),
        ):
            ended = run(running, folder, *options, FLYTE_DDP_PROFILE="sandbox", **environment)
            assert ended.exit_code == 0, ended.output
        yield running


def test_all_that_a_pod_needs_is_sent(admin: FakeFlyteAdmin, tmp_path: Path) -> None:
    folders = ("config/", "flyte_ddp/", "tasks/", "workflows/")
    sources = {name for name in packaged.project_files() if name.startswith(folders)}
    assert len(admin.uploads) == 2
    for upload in admin.uploads:
        (tmp_path / "sources.tar.gz").write_bytes(upload)
        assert sources <= packaged.names(tmp_path / "sources.tar.gz")


@pytest.mark.canary
def test_other_settings_are_another_version(admin: FakeFlyteAdmin) -> None:
    """As Flyte does not take another environment under a version that it has."""
    first, other = [execution.spec.launch_plan.version for execution in admin.executions]
    assert first != other
    for request in admin.tasks:
        variables = packaged.variables(request.spec.template)
        assert "FLYTE_DDP_SETTINGS" in variables
        assert "FLYTE_DDP_RUNS" not in variables


def test_retraining_reaches_the_pod(admin: FakeFlyteAdmin) -> None:
    variables = [{pair.key: pair.value for pair in each.spec.envs.values} for each in admin.executions]
    assert variables == [{}, {"FLYTE_DDP_FROM_SCRATCH": "yes"}]
    assert [each.spec.overwrite_cache for each in admin.executions] == [False, True]
