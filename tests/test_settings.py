"""Variables of the environment: what each may be, the page that shows them, and which pods are given which."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from cli import ROOT
from flytekit.extras import accelerators

from flyte_ddp.core import settings
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.settings import (
    ALL_PODS,
    HERE,
    REGISTRATION,
    REGISTRY_PODS,
    TRAINING_PODS,
    Variable,
    read_variable_table,
)
from flyte_ddp.pods import environment
from flyte_ddp.pods.profiles import PROFILES
from flytekitplugins.ddp.elastic import make_elastic_options
from tasks import pods

VALUES = {"PROFILE": "local", "NODES": "3", "RETRIES": "7", "HOURS": "7.5"}
VALUES |= {"MODULES": "torchvision,timm", "WANDB_SECRET": "some/value", "RESULTS": "s3://bucket/x"}


def test_the_table_has_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in read_variable_table():
        monkeypatch.delenv(name, raising=False)
    assert settings.read_settings() == settings.Settings()


@pytest.mark.parametrize("variable", read_variable_table().values(), ids=lambda variable: variable.name)
def test_pods_are_given_what_the_table_says(variable: Variable, monkeypatch: pytest.MonkeyPatch) -> None:
    name, value = variable.name, VALUES.get(variable.name.removeprefix("FLYTE_DDP_"), "some value")
    monkeypatch.setenv(name, value)
    made = (
        pods.training_pod_options(),
        pods.prediction_pod_options(),
        pods.storing_pod_options(),
        pods.registry_pod_options(),
        pods.data_pod_options(),
    )
    training, prediction, *registry, data = (options["environment"] for options in made)
    given = {
        HERE: (),
        REGISTRATION: (),
        ALL_PODS: (training, prediction, *registry, data),
        TRAINING_PODS: (training,),
        REGISTRY_PODS: (prediction, *registry),
    }[variable.where]
    assert all(each[name] == value for each in given)
    assert (name in environment.read_settings_for_pods()) is (variable.where != HERE)
    if variable.where == HERE:  # two of these are secrets
        assert not any(value in each.values() for each in (training, prediction, *registry, data))


def test_registration_decides_on_retries_and_time_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RETRIES": "7", "HOURS": "7.5", "MEET_SECONDS": "1800"}.items():
        monkeypatch.setenv(f"FLYTE_DDP_{name}", value)
    made = pods.training_pod_options(), pods.data_pod_options(), pods.registry_pod_options()
    assert made[0]["retries"] == 7
    assert [each["timeout"].total_seconds() / 3600 for each in made] == [7.5, 7.5, 1]
    assert set(make_elastic_options(1, 1, 1)["rdzv_configs"].values()) == {1800}


def test_a_pods_specification_has_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "https://me:hidden@wandb.example.com")
    with pytest.raises(UserError, match=r"^WANDB_BASE_URL='https://\*\*\*@wandb.example.com': has a user name or a"):
        environment.make_training_environment()


def registration(**variables: str) -> subprocess.CompletedProcess[str]:
    """What deploy/register.sh asks for, with no other of these variables set."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(("FLYTE_DDP_", "WANDB_"))}
    command = [sys.executable, "-m", "flyte_ddp.pods.environment"]
    return subprocess.run(command, cwd=ROOT, env=others | variables, capture_output=True, text=True, check=False)


def test_a_registration_takes_over_what_is_set_but_no_secret_no_folder_of_here_and_nothing_unknown() -> None:
    left = dict.fromkeys(("WANDB_API_KEY", "FLYTE_DDP_ELASTIC_KEY", "FLYTE_DDP_RUNS", "FLYTE_DDP_RESULTS"), "hidden")
    ended = registration(FLYTE_DDP_PROFILE="gpu", FLYTE_DDP_TIMEOUT="5", FLYTE_DDP_GPUS="1", WANDB_TAGS="a", **left)
    assert (ended.returncode, ended.stdout) == (0, "FLYTE_DDP_TIMEOUT=5\n")
    said = {line.partition(" is not sent to pods")[0] for line in ended.stderr.splitlines()}
    assert said == left.keys()
    ended = registration(FLYTE_DDP_MODULES="timm,subprocess")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("Error: FLYTE_DDP_MODULES='timm,subprocess': 'subprocess' is in Python's ")
    ended = registration(FLYTE_DDP_TIMOUT="5")
    assert ended.returncode == 1
    assert ended.stderr.startswith("Error: unknown variable 'FLYTE_DDP_TIMOUT': did you mean 'FLYTE_DDP_TIMEOUT'?")
    assert "listed in docs/configuration.md" in ended.stderr


@pytest.mark.parametrize("field", ["loaders", "wandb_table_rows", "cache_bytes"])
def test_what_is_counted_is_a_whole_number(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a thread is not none, which would mean all cores."""
    name = f"FLYTE_DDP_{field.upper()}"
    for value, number in {"3": 3, "1e3": 1000, "2.0": 2}.items():
        monkeypatch.setenv(name, value)
        assert getattr(settings.read_settings(), field) == number
    for value in ("0.5", "-1", "x", "inf"):
        monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=rf"^{name}='{value}': must be a"):
            settings.read_settings()


def test_a_template_can_be_named_for_pods_that_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYTE_DDP_POD_TEMPLATE", "flyte-ddp-read-only")
    for profile, of_gpus in (("local", "flyte-ddp-read-only"), ("gpu", "flyte-ddp-gpu")):
        monkeypatch.setenv("FLYTE_DDP_PROFILE", profile)
        made = (pods.registry_pod_options(), pods.data_pod_options(), pods.training_pod_options())
        names = [options["pod_template_name"] for options in made]
        assert names == ["flyte-ddp-read-only", "flyte-ddp-read-only", of_gpus]


def test_a_profile_can_ask_for_a_type_of_gpu_and_for_nodes_that_are_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYTE_DDP_PROFILE", "spot")
    monkeypatch.setitem(PROFILES, "spot", replace(PROFILES["gpu-a100"], interruptible=True))
    training, prediction = pods.training_pod_options(), pods.prediction_pod_options()
    for each in (training, prediction):
        assert each["accelerator"].to_flyte_idl().device == accelerators.A100.to_flyte_idl().device
    assert (training["interruptible"], prediction.get("interruptible")) == (True, None)


def test_a_version_knows_each_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYTE_DDP_PROFILE", "local")
    versions = {environment.make_settings_digest_variable()["FLYTE_DDP_SETTINGS"]}
    for name, value in {
        "FLYTE_DDP_PROFILE": "sandbox",
        "FLYTE_DDP_NODES": "2",
        "WANDB_PROJECT": "another",
        "FLYTE_DDP_NOTIFY": "a@example.com",
        "FLYTE_DDP_POD_TEMPLATE": "restricted",
        "FLYTE_DDP_RUNS": "elsewhere",
    }.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            found = environment.make_settings_digest_variable()["FLYTE_DDP_SETTINGS"]
        assert (found in versions) is (name == "FLYTE_DDP_RUNS"), "a pod knows nothing of the runs folder here"
        versions.add(found)
