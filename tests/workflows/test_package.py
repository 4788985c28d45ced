"""What a Flyte cluster is given: the serialized tasks, workflows and launch plans, read back from the package."""

import importlib
from typing import Any

import packaged
import pytest
import yaml
from cli import ROOT
from flyteidl.admin.launch_plan_pb2 import CONCURRENCY_LIMIT_BEHAVIOR_SKIP
from flyteidl.core.execution_pb2 import WorkflowExecution
from flyteidl.core.security_pb2 import Secret
from flyteidl.core.tasks_pb2 import Resources
from flytekit.core.type_engine import TypeEngine
from flytekit.models.interface import Variable
from google.protobuf.json_format import MessageToDict
from packaged import Package
from pod_inputs import CHECK, FETCH, PREDICT, TRAIN

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.user_code.digest import library_digest, package_digest
from flyte_ddp.monitor.source import WindowSource
from flyte_ddp.pods.profiles import ENGINES
from flyte_ddp.release.policy import Policy

DATA = (FETCH, *(f"tasks.shards.{name}" for name in ("pack_shards", "verify_packed")))
LIGHT = (CHECK,)
JUDGING = ("tasks.release.judge_model", "tasks.release.evaluate_version", "tasks.monitor.watch_champion")
LOAD = "tasks.finished_run.load_finished_run"
PROMOTING = tuple(f"tasks.release.{name}" for name in ("carry_out_verdict", "promote_version", "roll_back_champion"))
ALARM = "tasks.monitor.raise_alarm"
PROFILE, VALIDATE = (f"tasks.validation.{name}_dataset" for name in ("profile", "validate"))
pytestmark = pytest.mark.slow
TRAINING = {TRAIN, *(f"tasks.{engine}_training.train_on_{engine}" for engine in ENGINES)}
RUNG, REPORT = "tasks.sweep.run_rung", "tasks.sweep.report_sweep"
PLANS = {"training_on_demand", "nightly_retraining", "retraining_on_change"}
GPU, ONE_GPU = (
    {"CPU": cpu, "MEMORY": memory, "GPU": number, "EPHEMERAL_STORAGE": "20Gi"}
    for cpu, memory, number in (("8", "30Gi", "2"), ("4", "15360Mi", "1"))
)
LARGE = {"CPU": "2", "MEMORY": "8Gi", "EPHEMERAL_STORAGE": "100Gi"}
SMALL, SMALL_LIMITS = (
    {"CPU": cpu, "MEMORY": memory, "EPHEMERAL_STORAGE": "4Gi"} for cpu, memory in (("500m", "1Gi"), ("2", "4Gi"))
)


def resources(entries: Any) -> dict[str, str]:
    return {Resources.ResourceName.Name(entry.name): entry.value for entry in entries}


def environment(package: Package, task: str) -> dict[str, str]:
    return packaged.variables(package.tasks[task].template)


def test_everything_is_there(default: Package, sandbox: Package) -> None:
    """But a release needs a registry."""
    workflows = {
        *(f"workflows.training.{name}_wf" for name in ("training", "retraining")),
        *("workflows.prediction.predict_wf", "workflows.shards.shards_wf"),
        *("workflows.sweep.sweep_wf", "workflows.monitor.monitor_wf"),
        *(f"workflows.release.{name}_wf" for name in ("release", "promote", "rollback", "evaluate")),
        *(f"workflows.{engine}_training.{engine}_training_wf" for engine in ENGINES),
    }
    searching = {RUNG, REPORT, *(f"tasks.sweep.{name}" for name in ("plan_rung", "search"))}
    assert set(default.tasks) == {
        *(*LIGHT, *DATA, PREDICT, *TRAINING, LOAD, *JUDGING, *PROMOTING, ALARM, PROFILE, VALIDATE),
        *searching,
    }
    assert set(default.workflows) == workflows
    # Each workflow has a plan of its own name, Flyte's default.
    assert set(default.launch_plans) == PLANS | workflows | {"nightly_release"}
    assert set(sandbox.launch_plans) == {"hourly"} | workflows
    assert "best is skipped: FLYTE_DDP_REGISTRY is not set" in sandbox.output


@pytest.mark.parametrize(
    ("tasks", "requests", "limits", "of_gpus", "hours"),
    [
        ((TRAIN,), GPU, GPU, True, 24),
        ((PREDICT, *JUDGING), ONE_GPU, ONE_GPU, True, 24),
        (DATA, LARGE, LARGE, False, 24),
        (LIGHT, SMALL, SMALL_LIMITS, False, 1),
    ],
    ids=["training", "prediction", "data", "light"],
)
def test_pods_without_a_chosen_profile(
    default: Package,
    tasks: tuple[str, ...],
    requests: dict[str, str],
    limits: dict[str, str],
    of_gpus: bool,
    hours: int,
) -> None:
    """They have GPUs, as a sandbox is never registered by mistake, and only those of the profile have its template."""
    for name in tasks:
        template = default.tasks[name].template
        container, metadata = packaged.container(template).resources, template.metadata
        assert (resources(container.requests), resources(container.limits)) == (requests, limits), name
        assert metadata.pod_template_name == ("flyte-ddp-gpu" if of_gpus else "")
        retries = 100 if name in TRAINING else 2  # whose lost pods are many, and cost little
        assert (metadata.retries.retries, metadata.timeout.seconds) == (retries, hours * 3600)
        variables = environment(default, name)
        assert variables["FLYTE_DDP_GPUS"] == requests.get("GPU", "2"), "light pods check what training will have"
        assert (variables["FLYTE_DDP_PROFILE"], variables["FLYTE_DDP_CODE"]) == ("gpu", package_digest())
        assert variables["FLYTE_DDP_MODULES"] == ".", "hyperparameters may name the project's own modules"


def test_training_pods_know_how_long_their_last_checkpoint_may_take(default: Package, sandbox: Package) -> None:
    [in_cluster] = yaml.safe_load_all((ROOT / "deploy/pod-template.yaml").read_text())
    grace = in_cluster["template"]["spec"]["terminationGracePeriodSeconds"]
    assert environment(default, TRAIN)["FLYTE_DDP_SAVE_SECONDS"] == str(grace // 2) == "60"
    assert environment(default, TRAIN)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == str(grace - 5)
    assert environment(sandbox, TRAIN)["FLYTE_DDP_SAVE_SECONDS"] == "15", "of Kubernetes' own 30"


def test_each_task_satisfies_podsecurity_restricted(default: Package) -> None:
    """Flyte makes the pods of engines from the same specification."""
    for task in default.tasks.values():
        pod = MessageToDict(task.template.k8s_pod.pod_spec)
        assert pod["securityContext"] == packaged.RESTRICTED_POD
        assert pod["automountServiceAccountToken"] is False, "nothing in the pod asks Kubernetes' API"
        [container] = pod["containers"]
        assert container["securityContext"] == packaged.RESTRICTED_CONTAINER
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError", "as Flyte gives to other tasks"


def test_who_knows_wandb_and_where_results_go(default: Package, sandbox: Package) -> None:
    wandb = {"WANDB_PROJECT": "digits", "WANDB_MODE": "online", "FLYTE_DDP_WANDB_SECRET": "wandb/api_key"}
    for name, task in default.tasks.items():
        knows, secrets = name in {*TRAINING, RUNG}, task.template.security_context.secrets
        told = {key: value for key, value in environment(default, name).items() if "WANDB" in key}
        assert told == (wandb if knows else {}), name
        found = [(each.group, each.key, each.mount_requirement) for each in secrets]
        assert found == ([("wandb", "api_key", Secret.ENV_VAR)] if knows else [])
        assert ("FLYTE_DDP_RESULTS" in environment(default, name)) is knows
    assert environment(default, TRAIN)["FLYTE_DDP_RESULTS"] == "s3://bucket/results"
    assert environment(sandbox, TRAIN)["FLYTE_DDP_WANDB_SECRET"] == "off"
    assert "FLYTE_DDP_RESULTS" not in environment(sandbox, TRAIN), "a folder would go with the pod"


def test_caches_decks_and_outputs(default: Package) -> None:
    ignored = {FETCH: ("data_source",), **dict.fromkeys(TRAINING, ("data",)), PROFILE: ("data",)}
    for name, task in default.tasks.items():
        metadata = task.template.metadata
        assert metadata.discoverable is metadata.cache_serializable is (name in ignored), name
        if name in ignored:
            assert metadata.discovery_version == (package_digest() if name == PROFILE else library_digest())
            assert tuple(metadata.cache_ignore_input_vars) == ignored[name]
    shown = {name for name, task in default.tasks.items() if task.template.metadata.generates_deck.value}
    assert shown == {*TRAINING, PREDICT, *JUDGING, VALIDATE, RUNG, REPORT}
    outputs = default.workflows["workflows.training.training_wf"].template.interface.outputs.variables
    assert set(outputs) == {"epoch_accuracies", "model_state", "sidecar", "report", "metrics"}
    assert outputs["model_state"].type.blob.format == "python_pickle"


@pytest.mark.parametrize(
    ("name", "cron", "kickoff"),
    [
        ("nightly_retraining", "0 3 * * *", "kickoff_time"),
        ("retraining_on_change", "0 * * * *", ""),
        ("training_on_demand", "", ""),
    ],
)
def test_launch_plans(default: Package, name: str, cron: str, kickoff: str) -> None:
    """They start with all defaults; a tick is skipped while a run is going; failures are notified."""
    spec = default.launch_plans[name].spec
    schedule, policy = spec.entity_metadata.schedule, spec.concurrency_policy
    assert (schedule.cron_schedule.schedule, schedule.kickoff_time_input_arg) == (cron, kickoff)
    assert (policy.max, policy.behavior) == ((1, CONCURRENCY_LIMIT_BEHAVIOR_SKIP) if cron else (0, 0))
    parameters = spec.default_inputs.parameters
    assert packaged.hyperparameters(parameters["hp"].default) == Hyperparameters().to_dict()
    assert set(parameters) - {"hp"} <= {"kickoff_time"}
    assert not any(parameter.required for parameter in parameters.values())
    assert not spec.fixed_inputs.literals
    [notification] = spec.entity_metadata.notifications
    assert list(notification.email.recipients_email) == ["a@example.com", "b@example.com"]
    phases = {WorkflowExecution.Phase.Name(phase) for phase in notification.phases}
    assert phases == {"FAILED", "TIMED_OUT", "ABORTED"}


def test_a_fork_with_a_schedule_of_its_own(sandbox: Package) -> None:
    spec = sandbox.launch_plans["hourly"].spec
    assert spec.workflow_id.name == "workflows.training.retraining_wf"
    schedule = spec.entity_metadata.schedule
    assert (schedule.cron_schedule.schedule, schedule.kickoff_time_input_arg) == ("7 * * * *", "kickoff_time")
    assert not spec.entity_metadata.notifications
    hp = spec.default_inputs.parameters["hp"]
    assert packaged.hyperparameters(hp.default)["epochs"] == 7
    shown = packaged.form_fields(hp.var.type.metadata["definitions"]["Hyperparameters"])
    values = {name: field["default"] for name, field in shown.items()}
    assert values == Hyperparameters(epochs=7).to_dict(), "the console sends what its form begins with"


def test_the_console_draws_forms(default: Package) -> None:
    """Flytekit knows the types of a stored launch plan by them, as a client does that fetches one."""
    importlib.import_module("tasks.input_form")  # registers them in this process, as each import of tasks does
    forms = {"hp": Hyperparameters(), "policy": Policy(), "window": WindowSource()}
    for name in (name for name in default.workflows if name.endswith(("training_wf", "release_wf", "monitor_wf"))):
        inputs = default.workflows[name].template.interface.inputs.variables
        for variable, values in forms.items():
            if variable in inputs:
                kind, metadata = type(values), inputs[variable].type.metadata
                assert metadata["$ref"] == f"#/definitions/{kind.__name__}"
                fields = packaged.form_fields(metadata["definitions"][kind.__name__])
                assert [*fields] == [*values.to_dict()], "in this order, however Flyte shuffles objects"
                assert {name: fields[name]["default"] for name in fields} == values.to_dict()
                assert TypeEngine.guess_python_types({"x": Variable.from_flyte_idl(inputs[variable])}) == {"x": kind}
        if "hp" not in inputs:
            continue
        hp = packaged.form_fields(inputs["hp"].type.metadata["definitions"]["Hyperparameters"])
        assert list(hp["keep"]["enum"]) == ["last", "best", "ema"]
        assert "enum" not in hp["schedule"], "which would refuse the user's own"
        assert "constant, cosine to 0, one_cycle" in hp["schedule"]["description"]
        assert (hp["epochs"]["type"], hp["epochs"]["title"]) == ("integer", "epochs (integer)")
        assert hp["epochs"]["description"].startswith("Passes over")
