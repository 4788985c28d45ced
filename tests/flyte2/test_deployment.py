"""What a deployment sends to Flyte 2: tasks in their wire form, and the triggers of the file of schedules."""

import asyncio
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import is_dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from cli import HELPERS, ROOT
from flyte.errors import NonRecoverableError
from flyte2_cli import flyte

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.user_code.digest import library_digest, package_digest
from flyte_ddp.monitor.source import WindowSource
from flyte_ddp.pods.profiles import read_profile
from flyte_ddp.release.policy import Policy
from flyte_ddp.schedules.entries import read_schedules
from flyte_ddp.sweep.space import Sweep
from flyte_ddp.task_bodies import preparation

Modules = dict[str, ModuleType]
IMAGE = "registry.example/flyte-ddp:1"
PUBLIC = ("training", "retraining", "release", "promote", "rollback", "evaluate", "predict", "monitor", "sweep")
SCHEDULES = """
- {name: nightly, workflow: training_wf, cron: "0 3 * * *", hyperparameters: {epochs: 3, learning_rate: 1e-1}}
- {name: on_demand, workflow: training_wf}
- {name: best, workflow: release_wf, cron: "0 0 1 JAN MON-FRI", model_name: digits, policy: {rule: not_worse}}
- {name: watch, workflow: monitor_wf, cron: "5 * * * *", model_name: digits, window: {images: in/%H, hours_back: 1}}
- {name: search, workflow: sweep_wf, cron: "0 1 * * *", hyperparameters: {epochs: 2}, sweep: {space: {batch_size: [5]}}}
"""
NOW = datetime(2026, 11, 28, 3, tzinfo=UTC)


def list_tasks(flyte2: Modules) -> dict[str, Any]:
    """Return all tasks of the modules, by name."""
    from flyte._task import TaskTemplate

    found = [value for module in flyte2.values() for value in vars(module).values() if isinstance(value, TaskTemplate)]
    return {task.name.rpartition(".")[2]: task for task in found}


@pytest.fixture(scope="module")
def wires(flyte2: Modules) -> dict[str, Any]:
    """The wire forms of all tasks, by name."""
    from flyte._internal.image_cache import ImageCache
    from flyte._internal.runtime.task_serde import translate_task_to_wire
    from flyte.models import SerializationContext

    tasks = list_tasks(flyte2)
    images = ImageCache(image_lookup=dict.fromkeys([task.parent_env_name for task in tasks.values()], IMAGE))
    context = SerializationContext(version="v1", project="p", domain="d", org="o", root_dir=ROOT, image_cache=images)
    return {name: translate_task_to_wire(task, context).task_template for name, task in tasks.items()}


def read_container(wire: Any) -> dict[str, Any]:
    """Return the main container of a task, as Kubernetes reads the container."""
    spec = dict(wire.k8s_pod.pod_spec.items())
    [container] = [each for each in spec["containers"] if each["name"] == wire.config["primary_container_name"]]
    return dict(container)


def test_every_pod_has_the_image_the_code_and_no_telemetry(wires: dict[str, Any]) -> None:
    sources = "".join(path.read_text() for path in (ROOT / "flyte2").glob("*.py"))
    assert len(wires) == sources.count("\n@task(") + sources.count("\n@scheduled_task(")
    for name, wire in wires.items():
        container = read_container(wire)
        variables = {each["name"]: each["value"] for each in container["env"]}
        assert container["image"] == IMAGE
        assert variables["FLYTE_DISABLE_SENTRY"] == "true", name
        assert variables["FLYTE_DDP_CODE"] == package_digest()
        assert variables["FLYTE_DDP_PROFILE"] == "sandbox"
        assert wire.metadata.retries.retries > 0, name


def test_training_is_retried_cached_by_its_code_and_has_the_profiles_size(wires: dict[str, Any], monkeypatch) -> None:
    monkeypatch.setenv("FLYTE_DDP_PROFILE", "sandbox")
    train, driver, size = wires["train_model"], wires["training"], read_profile()
    assert train.metadata.discoverable
    assert train.metadata.discovery_version == library_digest()
    assert train.metadata.cache_serializable
    assert [*train.metadata.cache_ignore_input_vars] == ["data"]
    assert [*wires["fetch_dataset"].metadata.cache_ignore_input_vars] == ["data_source"]
    assert wires["profile_dataset"].metadata.discovery_version == package_digest()
    assert [name for name, wire in wires.items() if wire.metadata.discoverable] == [
        *("fetch_dataset", "train_model", "train_on_elastic", "profile_dataset")
    ]
    assert (train.metadata.retries.retries, driver.metadata.retries.retries) == (100, 2)
    assert wires["promote"].metadata.retries.retries == 2
    assert train.metadata.timeout.seconds == 24 * 3600
    assert train.metadata.generates_deck.value
    resources = read_container(train)["resources"]
    assert (resources["limits"]["cpu"], resources["limits"]["memory"]) == (size.cpu, size.memory)
    assert read_container(driver)["resources"]["requests"]["cpu"] == "500m"
    variables = {each["name"]: each["value"] for each in read_container(train)["env"]}
    assert variables["FLYTE_DDP_SAVE_SECONDS"] == str(size.grace_seconds // 2)
    for name in ("judge_model", "carry_out_verdict", "promote", "rollback", "monitor", "predict"):
        variables = {each["name"]: each["value"] for each in read_container(wires[name])["env"]}
        assert variables["FLYTE_DDP_REGISTRY"] == "s3://bucket/models", name


def read_wires(variables: dict[str, str]) -> Any:
    """Return what a process with these variables would send to Flyte 2, from flyte2_wires.py."""
    system = {name: value for name, value in os.environ.items() if not name.startswith(("FLYTE", "WANDB"))}
    command = [sys.executable, str(HELPERS / "flyte2_wires.py")]
    paths = os.pathsep.join([str(ROOT), str(HELPERS)])
    ended = subprocess.run(
        command, cwd=ROOT, env={**system, "PYTHONPATH": paths, **variables}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.slow
def test_tasks_that_a_pod_awaits_have_the_settings_of_the_deployment() -> None:
    """The SDK makes the pod of an awaited task from the variables of the pod that awaits."""
    settings = {
        "FLYTE_DDP_PROFILE": "gpu-a100",
        "FLYTE_DDP_NODES": "3",
        "FLYTE_DDP_RETRIES": "7",
        "FLYTE_DDP_HOURS": "5",
        "FLYTE_DDP_POD_TEMPLATE": "mine",
        "FLYTE_DDP_WANDB_SECRET": "group/key",
        "FLYTE_DDP_REGISTRY": "s3://bucket/models",
        "FLYTE_DDP_CHECKPOINTS": "s3://bucket/checkpoints",
        "FLYTE_DDP_CHECKPOINT_SECONDS": "9",
        "FLYTE_DDP_RESULTS": "s3://bucket/results",
        "FLYTE_DDP_FROM_SCRATCH": "yes",
        "WANDB_PROJECT": "project",
    }
    sent = read_wires(settings)
    train = sent["wires"]["ddp-training.train_model"]["taskTemplate"]
    assert (train["metadata"]["retries"], train["metadata"]["timeout"]) == ({"retries": 7}, "18000s")
    assert {"key": "WANDB_PROJECT", "value": "project"} in train["container"]["env"]
    assert "discoverable" not in train["metadata"]
    elastic = sent["wires"]["ddp-elastic.train_on_elastic"]["taskTemplate"]
    assert (elastic["type"], elastic["custom"]["replicas"], elastic["custom"]["nprocPerNode"]) == (
        "clustered-task",
        3,
        8,
    )

    from_pod = read_wires({**sent["variables"], "FLYTE_INTERNAL_EXECUTION_ID": "r1"})
    awaited = {name for name in sent["wires"] if not name.startswith("ddp-checks.")}
    assert len(awaited) > 5
    assert {name: from_pod["wires"][name] for name in awaited} == {name: sent["wires"][name] for name in awaited}


def test_outputs_are_one_dataclass_whose_fields_have_names(flyte2: Modules) -> None:
    """Flyte 2 would return several outputs as a bare tuple."""
    tasks = list_tasks(flyte2)
    for name in (*PUBLIC, "pack_and_verify"):
        [kind] = tasks[name].native_interface.outputs.values()
        assert is_dataclass(kind), name
    assert all(len(task.native_interface.outputs) == 1 for task in tasks.values())


def test_every_body_runs_in_the_main_thread(flyte2: Modules) -> None:
    """Flyte 2 calls a plain function in another thread, where Python handles no SIGTERM."""
    assert [name for name, task in list_tasks(flyte2).items() if not inspect.iscoroutinefunction(task.func)] == []


@pytest.fixture
def triggers(flyte2: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[Any, ...]]:
    """Make the triggers of SCHEDULES for a workflow."""
    (tmp_path / "schedules.yaml").write_text(SCHEDULES)
    monkeypatch.setattr(flyte2["schedules"], "read_schedules", lambda: read_schedules(tmp_path / "schedules.yaml"))
    monkeypatch.setenv("FLYTE_DDP_REGISTRY", "s3://bucket/models")
    make: Callable[[str], tuple[Any, ...]] = flyte2["schedules"].make_triggers
    return make


def send(task: Any, trigger: Any, wire: Any) -> tuple[Any, dict[str, Any]]:
    """Return a trigger's wire form, and the inputs that a pod reads from the wire form."""
    from flyte._internal.runtime.convert import Inputs, convert_inputs_to_native
    from flyte._internal.runtime.trigger_serde import to_task_trigger

    async def convert() -> tuple[Any, dict[str, Any]]:
        sent = await to_task_trigger(trigger, task.name, wire.interface.inputs, [])
        return sent, await convert_inputs_to_native(Inputs(sent.spec.inputs), task.native_interface)

    return asyncio.run(convert())


@pytest.mark.parametrize(
    ("workflow", "task", "cron", "inputs"),
    [
        ("training_wf", "training", "0 3 * * *", {"hp": Hyperparameters(epochs=3, learning_rate=0.1)}),
        (
            "release_wf",
            "release",
            "0 0 1 JAN MON-FRI",
            {"hp": Hyperparameters(), "model_name": "digits", "policy": Policy(rule="not_worse")},
        ),
        (
            "monitor_wf",
            "monitor",
            "5 * * * *",
            {"model_name": "digits", "window": WindowSource(images="in/%H", hours_back=1)},
        ),
        (
            "sweep_wf",
            "sweep",
            "0 1 * * *",
            {"hp": Hyperparameters(epochs=2), "sweep": Sweep(space='{"batch_size": [5]}')},
        ),
    ],
)
def test_an_entry_is_a_trigger_whose_run_gets_the_inputs(
    flyte2: Modules,
    wires: dict[str, Any],
    triggers: Callable[[str], tuple[Any, ...]],
    workflow: str,
    task: str,
    cron: str,
    inputs: dict[str, Any],
) -> None:
    trigger = triggers(workflow)[0]
    sent, received = send(list_tasks(flyte2)[task], trigger, wires[task])
    assert sent.automation_spec.schedule.cron.expression == cron
    assert sent.automation_spec.schedule.cron.timezone == "UTC"
    checked = {name: value.check() if hasattr(value, "check") else value for name, value in received.items()}
    assert checked == inputs
    assert trigger.custom_context == {"flyte-ddp-schedule": trigger.name}


def test_an_entry_without_times_has_a_trigger_without_automation(triggers: Callable[[str], Any], monkeypatch) -> None:
    nightly, on_demand = triggers("training_wf")
    assert (nightly.name, on_demand.name, on_demand.automation) == ("nightly", "on_demand", None)
    assert triggers("retraining_wf") == ()
    monkeypatch.delenv("FLYTE_DDP_REGISTRY")
    assert [triggers(workflow) for workflow in ("release_wf", "monitor_wf")] == [(), ()]


class ControlPlane:
    """Stands in for ``flyte.remote.Run``: answers requests whose options the SDK's functions accept."""

    def __init__(self, runs: list[tuple[str, str, int]]) -> None:
        from flyte.remote import Run

        self.runs = [make_run(*run) for run in runs]
        self.asked: list[dict[str, Any]] = []
        self.accepted = inspect.signature(Run.listall).parameters.keys()
        self.listall, self.get = SimpleNamespace(aio=self.list_runs), SimpleNamespace(aio=self.find_run)

    async def list_runs(self, **options: Any) -> AsyncIterator[Any]:
        assert options.keys() <= self.accepted
        self.asked.append(options)
        for run in self.runs:
            yield run

    async def find_run(self, name: str) -> Any:
        [found] = [run for run in self.runs if run.name == name]
        return found


def make_run(name: str, trigger: str, seconds: int) -> Any:
    """Return a run of a trigger that started so many seconds after NOW."""
    from flyteidl2.workflow.run_definition_pb2 import Run

    message = Run()
    message.action.metadata.trigger_name = trigger
    action = SimpleNamespace(start_time=NOW + timedelta(seconds=seconds))
    return SimpleNamespace(name=name, pb2=message, action=action)


ME = ("me", "nightly", 0)


@pytest.mark.parametrize(
    ("others", "scheduled", "refused"),
    [
        ([("before", "nightly", -60)], True, True),
        ([("a_name_before_mine", "nightly", 0)], True, True),
        ([("z", "nightly", 0)], True, False),
        ([("later", "nightly", 60)], True, False),
        ([("other", "hourly", -60)], True, False),
        ([], True, False),
        ([("before", "nightly", -60)], False, False),
    ],
)
def test_a_run_is_refused_while_an_earlier_one_of_its_schedule_is_active(
    flyte2: Modules,
    monkeypatch: pytest.MonkeyPatch,
    others: list[tuple[str, str, int]],
    scheduled: bool,
    refused: bool,
) -> None:
    """Of two runs at the same time, exactly one is refused."""
    from flyteidl2.common.phase_pb2 import ActionPhase

    schedules, plane = flyte2["schedules"], ControlPlane([ME, *others])
    context = {"flyte-ddp-schedule": "nightly"} if scheduled else {}
    me = SimpleNamespace(custom_context=context, action=SimpleNamespace(run_name="me"))
    monkeypatch.setattr(schedules.flyte, "ctx", lambda: me)
    monkeypatch.setattr(schedules.flyte.remote, "Run", plane)
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "me")
    if refused:
        said = f"nightly: run {others[0][0]} of the same schedule is not over; this run is skipped"
        with pytest.raises(UserError, match=re.escape(said)):
            asyncio.run(schedules.refuse_overlap())
    else:
        asyncio.run(schedules.refuse_overlap())
    assert len(plane.asked) == scheduled
    for options in plane.asked:
        assert all(ActionPhase.Value(f"ACTION_PHASE_{phase.upper()}") for phase in options["in_phase"])
    monkeypatch.delenv("FLYTE_INTERNAL_EXECUTION_ID")
    asyncio.run(schedules.refuse_overlap())  # a local run asks nobody
    assert len(plane.asked) == scheduled


SCHEDULED: dict[str, dict[str, str]] = {
    "training": {},
    "retraining": {},
    "elastic_training": {},
    "release": {"model_name": "digits"},
    "monitor": {"model_name": "digits"},
    "sweep": {},
}


@pytest.mark.parametrize("name", SCHEDULED)
def test_each_task_with_triggers_refuses_an_overlap(
    flyte2: Modules, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    me = SimpleNamespace(custom_context={"flyte-ddp-schedule": "nightly"}, action=SimpleNamespace(run_name="me"))
    monkeypatch.setattr(flyte2["schedules"].flyte, "ctx", lambda: me)
    monkeypatch.setattr(flyte2["schedules"].flyte.remote, "Run", ControlPlane([ME, ("before", "nightly", -60)]))
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "me")
    with pytest.raises(NonRecoverableError, match="nightly: run before of the same schedule is not over"):
        asyncio.run(list_tasks(flyte2)[name].func(**SCHEDULED[name]))


def test_all_tasks_with_triggers_are_those(flyte2: Modules) -> None:
    source = "".join(path.read_text() for path in (ROOT / "flyte2").glob("*.py"))
    names = re.findall(r"\n@scheduled_task\(.*\)\nasync def (\w+)\(", source)
    assert {*names} == {*SCHEDULED}
    assert source.count("make_triggers(") == 2, "only scheduled_task makes triggers"


@pytest.mark.parametrize(("said", "time"), [(NOW, NOW), (datetime(1970, 1, 1, tzinfo=UTC), NOW + timedelta(seconds=5))])
def test_the_time_of_a_run_is_asked_of_the_backend_if_the_pod_was_not_told(
    flyte2: Modules, monkeypatch: pytest.MonkeyPatch, said: datetime, time: datetime
) -> None:
    me = SimpleNamespace(action=SimpleNamespace(run_name="me"), run_start_time=said)
    monkeypatch.setattr(flyte2["schedules"].flyte, "ctx", lambda: me)
    monkeypatch.setattr(flyte2["schedules"].flyte.remote, "Run", ControlPlane([("me", "nightly", 5)]))
    assert asyncio.run(flyte2["schedules"].read_start_time()) == time


@pytest.mark.parametrize(
    ("name", "engine", "kickoff_time", "model_name"),
    [
        ("training", "", None, None),
        ("retraining", "", NOW, None),
        ("elastic_training", "elastic", None, None),
        ("release", "", NOW, "digits"),
        ("sweep", "", None, None),
    ],
)
def test_what_each_task_checks_before_training(
    flyte2: Modules,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    engine: str,
    kickoff_time: datetime | None,
    model_name: str | None,
) -> None:
    """Each attempt of a scheduled run has the same time, so each attempt has the same run."""

    def record(hp: Hyperparameters, *given: Any) -> None:
        raise UserError(f"checked {given}")

    monkeypatch.setattr(preparation, "check_training_inputs", record)
    me = SimpleNamespace(custom_context={}, run_start_time=NOW)
    monkeypatch.setattr(flyte2["schedules"].flyte, "ctx", lambda: me)
    said = re.escape(f"checked {(kickoff_time, engine, model_name, '')}")
    with pytest.raises(NonRecoverableError, match=said):
        asyncio.run(list_tasks(flyte2)[name].func(**SCHEDULED[name]))


def test_each_attempt_uploads_the_data_to_the_same_address(
    flyte2: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else another attempt would not find the training of the attempt before by its inputs."""
    training, names = flyte2["training"], []
    monkeypatch.setenv("FLYTE_DDP_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(training, "output_folder", lambda path, name="": names.append(name))
    checked = asyncio.run(training.check_inputs(Hyperparameters(dataset="digits", num_ranks=1)))
    assert names == [checked.data_version]
    assert checked.data_version.startswith("datasets/digits-")


@pytest.mark.slow
def test_a_dry_run_of_a_deployment_needs_no_cluster(flyte2: Modules, tmp_path: Path) -> None:
    address = ("--endpoint", "dns:///127.0.0.1:9", "--insecure")
    options = ("--dry-run", "--copy-style", "none", "--version", "v1", "--project", "p", "--domain", "d")
    ended = flyte(*address, "deploy", *options, "--image", IMAGE, "flyte2/deployment.py", "tasks", home=tmp_path)
    assert ended.exit_code == 0, ended.output
    assert [name for name, task in list_tasks(flyte2).items() if task.name not in ended.output] == []
    assert not [*(tmp_path / "runs").rglob("*")]
