"""What a Flyte cluster is given: the serialized tasks, workflows and launch plans, read back from the package."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import flytekit
import packaged
import pytest
import yaml
from cli import ROOT
from engine_rules import packed, resolved
from flyteidl.admin.launch_plan_pb2 import CONCURRENCY_LIMIT_BEHAVIOR_SKIP
from flyteidl.admin.task_pb2 import TaskSpec
from flyteidl.core.execution_pb2 import WorkflowExecution
from flyteidl.core.literals_pb2 import Literal
from flyteidl.core.security_pb2 import Secret
from flyteidl.core.tasks_pb2 import Resources
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.core.python_auto_container import PythonAutoContainerTask
from flytekit.core.type_engine import TypeEngine
from flytekit.models.interface import Variable
from flytekit.tools.translator import get_serializable
from google.protobuf.json_format import MessageToDict
from packaged import Package

from flyte_ddp.code_digest import library_digest, package_digest
from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError
from flyte_ddp.release.policy import Policy
from tasks import pods

CHECK, FETCH, TRAIN, PREDICT = (
    "tasks.preparation.check_inputs",
    "tasks.preparation.fetch_dataset",
    "tasks.training.train_model",
    "tasks.prediction.predict_images",
)
SHARDS = tuple(
    f"tasks.shards.{name}"
    for name in (
        "pack_shards",
        "index_shards",
        "join_shards",
        "verify_shards",
        "verify_packed",
        "show_shards",
        "sample_shards",
        "plan_shards",
    )
)
DATA = (FETCH, *(f"tasks.shards.{name}" for name in ("pack_shards", "index_shards", "verify_shards", "verify_packed")))
LIGHT = (CHECK, *(name for name in SHARDS if name not in DATA))
JUDGING = ("tasks.release.judge_model", "tasks.release.evaluate_version")
PROMOTING = tuple(
    f"tasks.release.{name}" for name in ("promote_challenger", "keep_champion", "promote_version", "roll_back_champion")
)
VALIDATING = ("tasks.validation.profile_dataset", "tasks.validation.validate_dataset")
ENGINES = ("elastic", "ray", "dask")
TRAINING = {TRAIN, *(f"tasks.{engine}_training.train_on_{engine}" for engine in ENGINES)}
PLANS = {"training_on_demand", "nightly_retraining", "retraining_on_change"}
GPU_RESOURCES = {"CPU": "8", "MEMORY": "30Gi", "GPU": "2", "EPHEMERAL_STORAGE": "20Gi"}


@pytest.fixture(scope="module")
def default(made: Callable[..., Package]) -> Package:
    """The package of somebody who chose no profile, but said whom to notify."""
    chosen = {"WANDB_PROJECT": "digits", "WANDB_MODE": "online", "FLYTE_DDP_RESULTS": "s3://bucket/results"}
    return made(FLYTE_DDP_NOTIFY="a@example.com, b@example.com", **chosen)


@pytest.fixture(scope="module")
def sandbox(made: Callable[..., Package]) -> Package:
    return made(FLYTE_DDP_PROFILE="sandbox", FLYTE_DDP_RESULTS="/a/folder")


def resources(entries: Any) -> dict[str, str]:
    return {Resources.ResourceName.Name(entry.name): entry.value for entry in entries}


def environment(package: Package, task: str) -> dict[str, str]:
    return {pair.key: pair.value for pair in packaged.container(package.tasks[task].template).env}


def serialized(task: PythonAutoContainerTask[Any]) -> TaskSpec:
    """What a cluster would be given of a task of this file."""
    settings = SerializationSettings(ImageConfig.auto(img_name="flyte-ddp:test"), version="1")
    return get_serializable(OrderedDict(), settings, task).to_flyte_idl()


@pytest.mark.slow
def test_everything_is_there(default: Package) -> None:
    workflows = {
        "workflows.training.training_wf",
        "workflows.training.retraining_wf",
        "workflows.prediction.predict_wf",
        "workflows.shards.shards_wf",
        *(f"workflows.release.{name}_wf" for name in ("release", "promote", "rollback", "evaluate")),
        *(f"workflows.{engine}_training.{engine}_training_wf" for engine in ENGINES),
    }
    assert set(default.tasks) == {CHECK, FETCH, PREDICT, *TRAINING, *SHARDS, *VALIDATING, *JUDGING, *PROMOTING}
    assert set(default.workflows) == workflows
    assert set(default.launch_plans) == PLANS | workflows  # each workflow has a plan of its own name, Flyte's default


def test_without_a_profile_the_training_pod_gets_gpus(default: Package) -> None:
    template = default.tasks[TRAIN].template
    assert resources(packaged.container(template).resources.requests) == GPU_RESOURCES
    assert resources(packaged.container(template).resources.limits) == GPU_RESOURCES
    assert template.extended_resources.shared_memory.size_limit == "4Gi"
    assert not template.extended_resources.HasField("gpu_accelerator")
    assert template.metadata.pod_template_name == "flyte-ddp-gpu"


@pytest.mark.slow
def test_training_pods_know_how_long_their_last_checkpoint_may_take(default: Package, sandbox: Package) -> None:
    [in_cluster] = yaml.safe_load_all((ROOT / "deploy/pod-template.yaml").read_text())
    grace = in_cluster["template"]["spec"]["terminationGracePeriodSeconds"]
    assert environment(default, TRAIN)["FLYTE_DDP_SAVE_SECONDS"] == str(grace // 2) == "60"
    assert environment(default, TRAIN)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == str(grace - 5)
    assert environment(sandbox, TRAIN)["FLYTE_DDP_SAVE_SECONDS"] == "15", "of Kubernetes' own 30"


@pytest.mark.slow
def test_the_sandbox_gets_none(sandbox: Package) -> None:
    template = sandbox.tasks[TRAIN].template
    expected = {"CPU": "1", "MEMORY": "2Gi", "EPHEMERAL_STORAGE": "2Gi"}
    assert resources(packaged.container(template).resources.requests) == expected
    assert resources(packaged.container(template).resources.limits) == expected
    assert template.extended_resources.shared_memory.size_limit == "128Mi"
    assert template.metadata.pod_template_name == ""
    assert not template.security_context.secrets


def test_each_task_satisfies_podsecurity_restricted(default: Package) -> None:
    """Flyte makes the pods of engines from the same specification."""
    for task in default.tasks.values():
        pod = MessageToDict(task.template.k8s_pod.pod_spec)
        assert pod["securityContext"] == packaged.RESTRICTED_POD
        [container] = pod["containers"]
        assert container["securityContext"] == packaged.RESTRICTED_CONTAINER
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError", "as Flyte gives to other tasks"


def test_a_template_can_be_named_for_pods_that_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYTE_DDP_POD_TEMPLATE", "flyte-ddp-read-only")

    def names() -> list[str]:
        every = (pods.light_pod(), pods.data_pod(), pods.prediction_pod(), pods.training_pod())
        return [options["pod_template_name"] for options in every]

    monkeypatch.setenv("FLYTE_DDP_PROFILE", "local")
    assert names() == ["flyte-ddp-read-only"] * 4
    monkeypatch.setenv("FLYTE_DDP_PROFILE", "gpu")
    assert names() == ["flyte-ddp-read-only"] * 2 + ["flyte-ddp-gpu"] * 2


def test_a_profile_can_be_for_nodes_that_are_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYTE_DDP_PROFILE", "spot")
    monkeypatch.setitem(pods.PROFILES, "spot", replace(pods.PROFILES["gpu"], interruptible=True))

    def train() -> None:
        """Nothing."""

    for options in (pods.training_pod(), pods.launching_pod(flytekit.Resources(cpu="1"))):
        assert flytekit.task(**options)(train).metadata.interruptible
    assert not flytekit.task(**pods.prediction_pod())(train).metadata.interruptible


def test_a_profile_can_ask_for_a_type_of_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYTE_DDP_PROFILE", "gpu-a100")
    monkeypatch.setenv("FLYTE_DDP_WANDB_SECRET", "off")

    def work() -> None:
        """Nothing."""

    predict, train = (flytekit.task(**options)(work) for options in (pods.prediction_pod(), pods.training_pod()))
    for task in (predict, train):
        assert serialized(task).template.extended_resources.gpu_accelerator.device == "nvidia-tesla-a100"
    template = serialized(train).template
    assert resources(packaged.container(template).resources.requests)["GPU"] == "8"
    assert resources(packaged.container(template).resources.limits)["GPU"] == "8"
    assert not template.security_context.secrets


@pytest.mark.slow
def test_an_unknown_profile_is_refused_with_the_choices(tmp_path: Path) -> None:
    ended, package = packaged.make(tmp_path, FLYTE_DDP_PROFILE="sandbux")
    assert ended.exit_code == 1
    assert ended.panel.startswith("unknown FLYTE_DDP_PROFILE 'sandbux': did you mean 'sandbox'? choose one of gpu, ")
    assert "Traceback" not in ended.output
    assert not package.tasks


@pytest.mark.parametrize("task", LIGHT)
def test_light_tasks_ask_for_little(default: Package, task: str) -> None:
    template = default.tasks[task].template
    asked = packaged.container(template).resources
    assert resources(asked.requests) == {"CPU": "500m", "MEMORY": "1Gi", "EPHEMERAL_STORAGE": "4Gi"}
    assert resources(asked.limits) == {"CPU": "2", "MEMORY": "4Gi", "EPHEMERAL_STORAGE": "4Gi"}
    assert template.metadata.pod_template_name == ""
    assert not template.security_context.secrets


def test_a_range_of_limits_that_fits_training_fits_the_other_tasks(sandbox: Package) -> None:
    """Kubernetes refuses a pod whose limit is above that of the namespace's LimitRange."""
    limits = {
        name: resources(packaged.container(task.template).resources.limits) for name, task in sandbox.tasks.items()
    }
    for name in (*LIGHT, *VALIDATING, *PROMOTING, *JUDGING, *DATA, PREDICT):
        assert pods.quantity(limits[name]["CPU"]) <= pods.quantity(limits[TRAIN]["CPU"]), name
        assert pods.quantity(limits[name]["MEMORY"]) <= pods.quantity(limits[TRAIN]["MEMORY"]), name


@pytest.mark.parametrize("task", DATA)
def test_tasks_that_all_data_go_through_have_room_for_them(default: Package, sandbox: Package, task: str) -> None:
    template = default.tasks[task].template
    asked = packaged.container(template).resources
    assert resources(asked.requests) == {"CPU": "2", "MEMORY": "8Gi", "EPHEMERAL_STORAGE": "100Gi"}
    assert resources(asked.limits) == resources(asked.requests)
    assert template.metadata.pod_template_name == "", "no GPU node"
    asked = packaged.container(sandbox.tasks[task].template).resources
    assert resources(asked.limits) == {"CPU": "1", "MEMORY": "2Gi", "EPHEMERAL_STORAGE": "4Gi"}, "fits on a laptop"


def test_predictions_are_made_on_one_gpu_where_the_profile_has_some(default: Package, sandbox: Package) -> None:
    template = default.tasks[PREDICT].template
    one = {"CPU": "4", "MEMORY": "15360Mi", "GPU": "1", "EPHEMERAL_STORAGE": "20Gi"}
    assert resources(packaged.container(template).resources.requests) == one
    assert resources(packaged.container(template).resources.limits) == one
    assert template.metadata.pod_template_name == "flyte-ddp-gpu", "tolerations, as training has"
    assert environment(default, PREDICT)["FLYTE_DDP_GPUS"] == "1"
    assert environment(default, PREDICT)["FLYTE_DDP_CACHE_BYTES"] == str(10 * 2**30)
    template = sandbox.tasks[PREDICT].template
    none = {"CPU": "1", "MEMORY": "2Gi", "EPHEMERAL_STORAGE": "2Gi"}
    assert resources(packaged.container(template).resources.limits) == none
    assert template.metadata.pod_template_name == ""
    assert environment(sandbox, PREDICT)["FLYTE_DDP_GPUS"] == "0"


@pytest.mark.parametrize("profile", ["default", "sandbox"])
def test_pods_know_what_was_requested(profile: str, request: pytest.FixtureRequest) -> None:
    package: Package = request.getfixturevalue(profile)
    requested = resources(packaged.container(package.tasks[TRAIN].template).resources.requests).get("GPU", "0")
    for task in package.tasks:
        variables = environment(package, task)
        if task not in (PREDICT, *JUDGING):  # which get one
            assert variables["FLYTE_DDP_GPUS"] == requested
        assert variables["FLYTE_DDP_PROFILE"] == {"default": "gpu", "sandbox": "sandbox"}[profile]
        assert variables["FLYTE_DDP_CODE"] == package_digest()


def test_pods_that_do_not_train_do_not_know_wandb(default: Package, sandbox: Package) -> None:
    wandb = {"WANDB_PROJECT": "digits", "WANDB_MODE": "online", "FLYTE_DDP_WANDB_SECRET": "wandb/api_key"}
    assert wandb.items() <= environment(default, TRAIN).items()
    for task in (CHECK, FETCH, PREDICT, *SHARDS):
        assert not [name for name in environment(default, task) if "WANDB" in name]
    [secret] = default.tasks[TRAIN].template.security_context.secrets
    assert (secret.group, secret.key, secret.mount_requirement) == ("wandb", "api_key", Secret.ENV_VAR)
    assert environment(sandbox, TRAIN)["FLYTE_DDP_WANDB_SECRET"] == "off"


def test_who_promotes_knows_wandb(default: Package) -> None:
    wandb = {"WANDB_PROJECT": "digits", "WANDB_MODE": "online", "FLYTE_DDP_WANDB_SECRET": "wandb/api_key"}
    for task in PROMOTING:
        keeps = task.endswith("keep_champion")
        assert (wandb.items() <= environment(default, task).items()) is not keeps
        assert bool(default.tasks[task].template.security_context.secrets) is not keeps


def test_only_the_training_pod_copies_results(default: Package, sandbox: Package) -> None:
    assert environment(default, TRAIN)["FLYTE_DDP_RESULTS"] == "s3://bucket/results"
    assert "FLYTE_DDP_RESULTS" not in environment(default, CHECK)
    assert "FLYTE_DDP_RESULTS" not in environment(sandbox, TRAIN), "a folder would go with the pod"


def test_retries_and_timeouts(default: Package) -> None:
    hour = 3600
    for task, timeout in {**dict.fromkeys(LIGHT, hour), **dict.fromkeys((*DATA, PREDICT), 24 * hour)}.items():
        metadata = default.tasks[task].template.metadata
        assert (metadata.retries.retries, metadata.timeout.seconds) == (2, timeout), task
    for task in TRAINING:  # whose lost pods are many, and cost little
        metadata = default.tasks[task].template.metadata
        assert (metadata.retries.retries, metadata.timeout.seconds) == (pods.LOSSES, 24 * hour), task


def test_caching_is_by_the_library_and_the_inputs(default: Package) -> None:
    for task, ignored in {FETCH: ["data_source"], TRAIN: ["data"]}.items():
        metadata = default.tasks[task].template.metadata
        assert metadata.discoverable
        assert metadata.discovery_version == library_digest()
        assert metadata.cache_serializable
        assert list(metadata.cache_ignore_input_vars) == ignored
    assert not default.tasks[CHECK].template.metadata.discoverable
    assert not default.tasks[PREDICT].template.metadata.discoverable


@pytest.mark.parametrize("hp", [{}, {"epochs": 3.0}], ids=["nothing", "a part"])
def test_what_the_console_leaves_out_is_not_asked_for(default: Package, hp: dict[str, float]) -> None:
    """The first task completes the hyperparameters; others take them from there."""
    given = Literal()
    given.scalar.generic.update(hp)
    for name, workflow in default.workflows.items():
        if name.endswith("training_wf"):
            [check, train] = workflow.template.nodes
            made = {"hp": packed(Hyperparameters(**hp).to_dict()), "data": Literal(), "run_version": Literal()}
            inputs = resolved(check.inputs, {"start-node": {"hp": given, "kickoff_time": Literal()}})
            assert inputs["hp"] == given
            assert resolved(train.inputs, {check.id: made}) == made


def test_tasks_that_have_something_to_show_have_a_deck(default: Package) -> None:
    found = {name for name, task in default.tasks.items() if task.template.metadata.generates_deck.value}
    assert found == {*TRAINING, CHECK, PREDICT, *JUDGING, VALIDATING[1], "tasks.shards.verify_packed"}


def test_training_returns_what_it_says(default: Package) -> None:
    outputs = default.workflows["workflows.training.training_wf"].template.interface.outputs.variables
    assert set(outputs) == {"epoch_accuracies", "model_state", "sidecar", "report", "metrics"}
    assert outputs["model_state"].type.blob.format == "python_pickle"


def test_schedules(default: Package) -> None:
    schedules = {name: default.launch_plans[name].spec.entity_metadata.schedule for name in PLANS}
    nightly, hourly = schedules["nightly_retraining"], schedules["retraining_on_change"]
    assert (nightly.cron_schedule.schedule, nightly.kickoff_time_input_arg) == ("0 3 * * *", "kickoff_time")
    assert (hourly.cron_schedule.schedule, hourly.kickoff_time_input_arg) == ("0 * * * *", "")
    assert not schedules["training_on_demand"].ByteSize()


def test_a_tick_is_skipped_while_a_run_is_going(default: Package) -> None:
    for name, most in {"nightly_retraining": 1, "retraining_on_change": 1, "training_on_demand": 0}.items():
        policy = default.launch_plans[name].spec.concurrency_policy
        assert (policy.max, policy.behavior) == (most, CONCURRENCY_LIMIT_BEHAVIOR_SKIP if most else 0)


@pytest.mark.parametrize("name", sorted(PLANS))
def test_plans_start_with_all_defaults(default: Package, name: str) -> None:
    spec = default.launch_plans[name].spec
    parameters = spec.default_inputs.parameters
    assert packaged.hyperparameters(parameters["hp"].default) == Hyperparameters().to_dict()
    assert set(parameters) - {"hp"} <= {"kickoff_time"}
    assert not any(parameter.required for parameter in parameters.values())
    assert not spec.fixed_inputs.literals


@pytest.mark.parametrize("name", sorted(PLANS))
def test_failures_are_notified(default: Package, sandbox: Package, name: str) -> None:
    [notification] = default.launch_plans[name].spec.entity_metadata.notifications
    assert list(notification.email.recipients_email) == ["a@example.com", "b@example.com"]
    phases = {WorkflowExecution.Phase.Name(phase) for phase in notification.phases}
    assert phases == {"FAILED", "TIMED_OUT", "ABORTED"}
    assert not sandbox.launch_plans[name].spec.entity_metadata.notifications


def test_the_console_explains_tasks_and_workflows(default: Package) -> None:
    entities = {**default.tasks, **default.workflows}
    descriptions = {name: entity.description.short_description for name, entity in entities.items()}
    assert descriptions[TRAIN] == "Train a model with distributed data parallelism on all GPUs of one pod."
    for name, description in descriptions.items():
        assert description.endswith("."), name
    for name, workflow in default.workflows.items():  # whose pages show nothing else
        assert workflow.description.long_description.value.startswith("In"), name
        assert not re.search(r"\bo\d\b", " ".join(workflow.template.interface.outputs.variables)), name


def test_flytekit_knows_the_type_of_a_form(default: Package) -> None:
    """As a client does that fetches a launch plan, of which it has the stored type only."""
    inputs = default.workflows["workflows.release.release_wf"].template.interface.inputs.variables
    types = TypeEngine.guess_python_types({name: Variable.from_flyte_idl(inputs[name]) for name in ("hp", "policy")})
    assert types == {"hp": Hyperparameters, "policy": Policy}


def test_every_input_has_its_help(default: Package) -> None:
    for name, workflow in default.workflows.items():
        for variable, found in workflow.template.interface.inputs.variables.items():
            assert len(found.description) > len(variable) + 10, f"{name}: {variable}"
            assert found.description.endswith("."), f"{name}: {variable}"


def test_a_release_needs_nothing_below_the_long_form(default: Package) -> None:
    """The console sorts inputs by name, and does not say which of them it waits for before one can launch."""
    parameters = default.launch_plans["workflows.release.release_wf"].spec.default_inputs.parameters
    assert not [name for name, parameter in parameters.items() if parameter.required]


def test_the_console_draws_a_form(default: Package) -> None:
    for name, workflow in default.workflows.items():
        if name.endswith("training_wf"):
            metadata = workflow.template.interface.inputs.variables["hp"].type.metadata
            assert metadata["$ref"] == "#/definitions/Hyperparameters"
            fields = packaged.form_fields(metadata["definitions"]["Hyperparameters"])
            assert [*fields] == [*Hyperparameters().to_dict()], "in this order, however Flyte shuffles objects"
            assert {name: fields[name]["default"] for name in fields} == Hyperparameters().to_dict()
            assert list(fields["schedule"]["enum"]) == ["constant", "cosine", "one_cycle"]
            assert (fields["epochs"]["type"], fields["epochs"]["title"]) == ("integer", "epochs (integer)")
            assert fields["epochs"]["description"].startswith("Passes over")
    metadata = default.workflows["workflows.release.release_wf"].template.interface.inputs.variables["policy"].type
    fields = packaged.form_fields(metadata.metadata["definitions"]["Policy"])
    assert [*fields] == [*Policy().to_dict()]
    assert {name: fields[name]["default"] for name in fields} == Policy().to_dict()
    assert list(fields["rule"]["enum"]) == ["superior", "not_worse"]


@pytest.mark.parametrize("name", ["abc", "/key", "group/"])
def test_a_secret_has_a_group_and_a_key(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(pods.SECRET_VARIABLE, name)
    with pytest.raises(
        UserError, match=rf"FLYTE_DDP_WANDB_SECRET='{name}': must be a secret's group/key, such as wandb/"
    ):
        pods.wandb_secret()


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("8", 8), ("3500m", 3.5), ("0.5", 0.5), (".5", 0.5), ("1k", 1000), ("129e6", 129e6), ("129", 129)),
        *(("20Gi", 20 * 2**30), ("1.5Gi", 3 * 2**29), ("20G", 2e10), ("123Mi", 123 * 2**20), ("2Ei", 2**61)),
    ],
)
def test_kubernetes_quantities(text: str, number: float) -> None:
    assert pods.quantity(text) == number


@pytest.mark.parametrize("text", ["", "0", "-1", "8 cores", "20GB", "20gi", "1e", "Gi", "1.2.3", "nan", "8\n"])
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(UserError, match=r"quantity '.*must be one of Kubernetes', such as 8, 3500m"):
        pods.quantity(text)


@pytest.mark.parametrize(
    ("cpu", "memory", "half", "ranks"),
    [
        ("3500m", "1.5Gi", ("1750m", "768Mi"), 3),
        ("0.5", "2000000000", ("250m", "953Mi"), 1),
        ("8", "4Gi", ("4", "2048Mi"), 4),
    ],
)
def test_profiles_in_any_quantities(
    monkeypatch: pytest.MonkeyPatch, cpu: str, memory: str, half: tuple[str, str], ranks: int
) -> None:
    profile = replace(pods.PROFILES["local"], cpu=cpu, memory=memory)
    monkeypatch.setenv(pods.PROFILE_VARIABLE, "local")
    monkeypatch.setitem(pods.PROFILES, "local", profile)
    whole, part = pods.resources_of(profile), pods.resources_of(profile, 2)
    assert (pods.quantity(whole.cpu), whole.mem) == (pods.quantity(cpu), memory)
    assert (part.cpu, part.mem) == half
    assert pods.ranks_of_elastic() == ranks


def test_the_pod_template_is_the_one_that_profiles_name() -> None:
    template = yaml.safe_load((ROOT / "deploy/pod-template.yaml").read_text())
    assert template["kind"] == "PodTemplate"
    of_gpus = {profile.pod_template for profile in pods.PROFILES.values() if profile.gpus}
    assert of_gpus == {template["metadata"]["name"]}
    spec = template["template"]["spec"]
    [container] = spec["containers"]
    assert container["name"] in ("default", "primary")  # Flyte merges containers of these names, and refuses others
    assert container["imagePullPolicy"] == "IfNotPresent"  # which the API server would otherwise set to Always
    assert spec["terminationGracePeriodSeconds"] > 30  # what Kubernetes gives without it, and wandb may take alone
    [toleration] = spec["tolerations"]
    assert (toleration["key"], toleration["effect"]) == ("nvidia.com/gpu", "NoSchedule")


def test_templates_for_a_read_only_root_have_all_of_the_others() -> None:
    """Folders of the pod's own are where the image's user writes."""
    plain, of_gpus = yaml.safe_load_all((ROOT / "deploy/pod-template-read-only.yaml").read_text())
    ours = yaml.safe_load((ROOT / "deploy/pod-template.yaml").read_text())
    assert plain["metadata"]["name"] == "flyte-ddp-read-only"
    assert of_gpus["metadata"] == ours["metadata"]
    specs = [template["template"]["spec"] for template in (plain, of_gpus)]
    for spec in specs:
        [container] = spec["containers"]
        assert container.pop("securityContext") == {"readOnlyRootFilesystem": True}
        assert {each["mountPath"] for each in container.pop("volumeMounts")} == {"/tmp", "/root"}
        assert [each["emptyDir"] for each in spec.pop("volumes")] == [{}, {}]
        assert spec.pop("securityContext") == {"fsGroup": 1000}
        assert spec["containers"] == ours["template"]["spec"]["containers"]
    assert specs == [{"containers": specs[0]["containers"]}, ours["template"]["spec"]]
