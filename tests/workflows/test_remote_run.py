"""``pyflyte run --remote`` as one types it, against a Flyte that takes everything and remembers it."""

from __future__ import annotations

from pathlib import Path

import packaged
import pytest
import yaml
from cli import ROOT, WORKFLOWS, Ended, pyflyte
from fake_flyte_admin import FakeFlyteAdmin, fake_flyte_admin, slow

pytestmark = pytest.mark.slow


def run(admin: FakeFlyteAdmin, folder: Path, *options: str, **environment: str) -> Ended:
    """Gives the command."""
    config = yaml.safe_load((ROOT / "deploy/sandbox.yaml").read_text())
    config["admin"]["endpoint"] = admin.endpoint
    (folder / "cluster.yaml").write_text(yaml.safe_dump(config))
    command = ["--config", str(folder / "cluster.yaml"), "run", "--remote", "--image", "flyte-ddp:1", *options]
    return pyflyte(*command, WORKFLOWS, "training_wf", "--hp", '{"epochs": 3}', home=folder / "home", **environment)


def run_remotely(admin: FakeFlyteAdmin, folder: Path, *options: str, **environment: str) -> FakeFlyteAdmin:
    """Gives it, and it goes well."""
    ended = run(admin, folder, *options, **environment)
    assert ended.exit_code == 0, ended.output
    return admin


def versions(admin: FakeFlyteAdmin) -> list[str]:
    """Of what was launched, one after the other."""
    return [execution.spec.launch_plan.version for execution in admin.executions]


def test_all_that_a_pod_needs_is_sent(tmp_path: Path) -> None:
    with fake_flyte_admin() as admin:
        run_remotely(admin, tmp_path, FLYTE_DDP_PROFILE="sandbox")
    [upload] = admin.uploads
    (tmp_path / "sources.tar.gz").write_bytes(upload)
    folders = ("config/", "flyte_ddp/", "tasks/", "workflows/")
    sources = {name for name in packaged.project_files() if name.startswith(folders)}
    assert sources <= packaged.names(tmp_path / "sources.tar.gz")


def test_other_settings_are_another_version(tmp_path: Path) -> None:
    """As Flyte does not take another environment under a version that it has."""
    settings = (
        {"FLYTE_DDP_PROFILE": "sandbox"},
        {"FLYTE_DDP_PROFILE": "local"},
        {"FLYTE_DDP_PROFILE": "local", "FLYTE_DDP_NODES": "2"},
        {"FLYTE_DDP_PROFILE": "local", "WANDB_PROJECT": "another"},
        {"FLYTE_DDP_PROFILE": "local", "FLYTE_DDP_NOTIFY": "a@example.com"},
        {"FLYTE_DDP_PROFILE": "local", "FLYTE_DDP_RUNS": "elsewhere"},  # of which a pod knows nothing
    )
    with fake_flyte_admin() as admin:
        for each in settings:
            run_remotely(admin, tmp_path, **each)
    assert len({*versions(admin)}) == len(settings) - 1
    assert versions(admin)[-1] == versions(admin)[1]
    for request in admin.tasks:
        variables = {pair.key for pair in request.spec.template.container.env}
        assert "FLYTE_DDP_SETTINGS" in variables
        assert "FLYTE_DDP_RUNS" not in variables


def test_a_call_that_takes_too_long_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "from flytekit.clients.grpc_utils import deadline_interceptor as flytekits\n"
        "set_to = flytekits.scoped_grpc_deadline\n"
        "flytekits.scoped_grpc_deadline = lambda seconds: set_to(seconds / 20)\n"
    )
    with fake_flyte_admin() as admin:
        admin.faults["CreateExecution"] = slow
        ended = run(admin, tmp_path, FLYTE_DDP_PROFILE="sandbox", PYTHONPATH=str(tmp_path))
    assert ended.exit_code == 1
    assert f"{admin.endpoint} is too slow: a call had no answer in time" in " ".join(ended.output.split())
    assert "Traceback" not in ended.output


def test_retraining_reaches_the_pod(tmp_path: Path) -> None:
    with fake_flyte_admin() as admin:
        run_remotely(admin, tmp_path, FLYTE_DDP_PROFILE="sandbox")
        run_remotely(admin, tmp_path, "--overwrite-cache", FLYTE_DDP_PROFILE="sandbox")
    variables = [{pair.key: pair.value for pair in each.spec.envs.values} for each in admin.executions]
    assert variables == [{}, {"FLYTE_DDP_FROM_SCRATCH": "yes"}]
    assert [each.spec.overwrite_cache for each in admin.executions] == [False, True]
