"""Training on engines, as Flyte is given it: the specs that their plugins make, and what there is without a plugin.

The files in ``recorded`` are what Flyte 1.16.8 made of these specs on a cluster with the pod template of deploy/.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import packaged
import pytest
import yaml
from cli import ROOT, train
from flytekit.types.directory import FlyteDirectory
from google.protobuf.json_format import MessageToDict
from kept_checkpoints import IDENTITY
from packaged import Package
from training_runs import QUIET

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.machine.resources import Request
from flyte_ddp.core.runs.work import Work
from flyte_ddp.core.settings import read_settings
from flyte_ddp.core.training.plan import TrainingJob
from flyte_ddp.plans.data_on_host import read_prepared_digest, set_data_folder_on_host
from flyte_ddp.plans.resolve import resolve
from flyte_ddp.pods.profiles import ENGINES, PROFILES, Size, divide_size, parse_quantity
from flyte_ddp.run import run_training
from flytekitplugins.ddp import dask, ray
from tasks.elastic_training import offer_data_to_ranks

TEMPLATE = yaml.safe_load((ROOT / "deploy/pod-template.yaml").read_text())["template"]["spec"]


def task(package: Package, engine: str) -> Any:
    return package.tasks[f"tasks.{engine}_training.train_on_{engine}"].template


def custom(package: Package, engine: str) -> dict[str, Any]:
    return MessageToDict(task(package, engine).custom)


def recorded(name: str) -> Any:
    return yaml.safe_load((Path(__file__).parent / "recorded" / name).read_text())["spec"]


def container_resources(container: dict[str, Any]) -> dict[str, str]:
    """Requests and limits of a container, which must be the same."""
    assert container["resources"]["requests"] == container["resources"]["limits"]
    return dict(container["resources"]["limits"])


def node_resources(profile: Size) -> dict[str, str]:
    """Those of a pod with all that a profile has."""
    sizes = {"cpu": profile.cpu, "memory": profile.memory, "ephemeral-storage": profile.ephemeral_storage}
    return {**sizes, "nvidia.com/gpu": str(profile.gpus)}


def check_recorded_pod(spec: dict[str, Any], shared_memory: str = "") -> dict[str, Any]:
    """Check a recorded pod against the pod template of deploy/ and PodSecurity; return its only container."""
    [container] = spec["containers"]
    assert spec["tolerations"][: len(TEMPLATE["tolerations"])] == TEMPLATE["tolerations"]
    assert spec["terminationGracePeriodSeconds"] == TEMPLATE["terminationGracePeriodSeconds"]
    assert container["imagePullPolicy"] == TEMPLATE["containers"][0]["imagePullPolicy"]
    assert spec["securityContext"] == packaged.RESTRICTED_POD
    assert container["securityContext"] == packaged.RESTRICTED_CONTAINER
    if shared_memory:
        [volume] = spec["volumes"]
        assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": shared_memory}
        assert container["volumeMounts"] == [{"mountPath": "/dev/shm", "name": volume["name"]}]
    return dict(container)


@pytest.mark.slow
def test_several_nodes_are_a_pytorchjob_or_a_ray_cluster(of_two_nodes: Package) -> None:
    package = of_two_nodes
    template = task(package, "elastic")
    assert template.type == "pytorch"
    assert template.extended_resources.shared_memory.size_limit == "4Gi"
    assert "PodTemplate" not in str(template.config), "the plugin's own shared memory has no limit"
    config = {"rdzvBackend": "c10d", "minReplicas": 2, "maxReplicas": 2, "nprocPerNode": 2, "maxRestarts": 2}
    assert custom(package, "elastic") == {
        "workerReplicas": {"replicas": 2, "restartPolicy": "RESTART_POLICY_ON_FAILURE"},
        "elasticConfig": config,
        "runPolicy": {"cleanPodPolicy": "CLEANPOD_POLICY_RUNNING", "backoffLimit": 4},
    }
    resources = packaged.container(template).resources
    assert len(resources.requests) == 4
    assert [*resources.requests] == [*resources.limits]

    assert task(package, "ray").type == "ray"
    cluster, head = custom(package, "ray")["rayCluster"], node_resources(ray.HEAD)
    assert "enableAutoscaling" not in cluster
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    del head["nvidia.com/gpu"]
    [container] = cluster["headGroupSpec"]["k8sPod"]["podSpec"]["containers"]
    assert container_resources(container) == head
    [group] = cluster["workerGroupSpec"]
    assert group["replicas"] == 2
    assert container_resources(group["k8sPod"]["podSpec"]["containers"][0]) == node_resources(PROFILES["gpu"])
    assert custom(package, "ray")["shutdownAfterJobFinishes"]


@pytest.mark.slow
def test_a_recorded_pytorchjob_is_as_the_profile_says(of_two_nodes: Package) -> None:
    job, profile, package = recorded("elastic-gpu.yaml"), PROFILES["gpu"], of_two_nodes
    worker, given = job["pytorchReplicaSpecs"]["Worker"], custom(package, "elastic")
    assert (worker["replicas"], worker["restartPolicy"]) == (given["workerReplicas"]["replicas"], "OnFailure")
    today = {name.replace("nprocPerNode", "nProcPerNode"): value for name, value in given["elasticConfig"].items()}
    assert job["elasticPolicy"] == today
    assert job["elasticPolicy"]["nProcPerNode"] == profile.gpus
    assert job["runPolicy"]["backoffLimit"] == given["runPolicy"]["backoffLimit"]
    assert job["runPolicy"]["cleanPodPolicy"] == "Running"
    container = check_recorded_pod(worker["template"]["spec"], profile.shared_memory)
    assert container_resources(container) == node_resources(profile)
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    environment = {each["name"]: each["value"] for each in container["env"]}
    given_environment = {each.key: each.value for each in packaged.container(task(package, "elastic")).env}
    assert environment.items() <= given_environment.items()


@pytest.mark.slow
def test_dask_has_a_worker_for_each_gpu(of_two_nodes: Package) -> None:
    package = of_two_nodes
    assert task(package, "dask").type == "dask"
    spec = custom(package, "dask")
    assert spec["workers"]["numberOfWorkers"] == 4
    expected = {
        "workers": {"CPU": "4", "MEMORY": "15360Mi", "GPU": "1", "EPHEMERAL_STORAGE": "20Gi"},
        "scheduler": {"CPU": "500m", "MEMORY": "512Mi", "EPHEMERAL_STORAGE": "1Gi"},
    }
    for kind, sizes in expected.items():
        for given in ("requests", "limits"):
            assert {each["name"]: each["value"] for each in spec[kind]["resources"][given]} == sizes


def test_a_recorded_daskjob_is_as_the_profile_says() -> None:
    """The plugin makes all pods from one, but for their resources."""
    job, profile = recorded("dask-gpu.yaml"), PROFILES["gpu"]
    cluster = job["cluster"]["spec"]
    assert cluster["worker"]["replicas"] == 2 * profile.gpus
    for pod, size in (
        (cluster["worker"], divide_size(profile, profile.gpus)),
        (cluster["scheduler"], dask.SCHEDULER),
        (job["job"], dask.RUNNER),
    ):
        found = container_resources(check_recorded_pod(pod["spec"], profile.shared_memory))
        assert found.get("nvidia.com/gpu", "0") == str(size.gpus)
        assert parse_quantity(found["cpu"]) == parse_quantity(size.cpu)
        assert parse_quantity(found["memory"]) == parse_quantity(size.memory)
        assert found["ephemeral-storage"] == size.ephemeral_storage


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_tasks_are_as_the_main_one(default: Package, engine: str) -> None:
    """Inputs are checked by what the engine will get; Elastic on one node is a plain pod."""
    mine, main = task(default, engine), default.tasks["tasks.training.train_model"].template
    if engine == "elastic":
        assert (mine.type, MessageToDict(mine.custom)) == ("python-task", {})
        assert mine.extended_resources.shared_memory.size_limit == "4Gi"
        assert mine.metadata.retries.retries == 100
    assert mine.interface == main.interface
    assert (mine.metadata.discoverable, mine.metadata.discovery_version) == (True, main.metadata.discovery_version)
    assert mine.metadata.generates_deck.value
    assert mine.metadata.timeout == main.metadata.timeout
    assert packaged.container(mine).image == packaged.container(main).image
    assert [*packaged.container(mine).env] == [*packaged.container(main).env]
    assert mine.security_context == main.security_context
    nodes = default.workflows[f"workflows.{engine}_training.{engine}_training_wf"].template.nodes
    [node] = [node for node in nodes if node.task_node.reference_id.name == "tasks.preparation.check_inputs"]
    bound = {binding.var: binding.binding for binding in node.inputs}
    assert bound["engine"].scalar.primitive.string_value == engine


@pytest.mark.slow
def test_pyflyte_run_trains_the_same_model(digits: Path, tmp_path: Path) -> None:
    """As two spawned ranks."""
    hp = {"num_ranks": 2, "max_steps": 5, "backend": "gloo", "precision": "fp32"}
    options = {"home": tmp_path / "home", "runs": tmp_path / "runs", "FLYTE_DDP_PROFILE": "local"}
    ended = train(hp, "elastic_training_wf", str(ROOT / "workflows/elastic_training.py"), **options)
    assert ended.exit_code == 0, ended.output
    [found] = (tmp_path / "runs").glob("*/model.pt")
    assert found.read_bytes() == run_training(Hyperparameters(**hp), digits, tmp_path / "run", QUIET).model.read_bytes()


def test_pods_without_the_launcher_get_the_prepared_data_from_the_blob_store(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their ranks do not look at the data's source."""
    monkeypatch.setenv("FLYTE_DDP_CACHE", str(tmp_path / "cache"))
    hp = Hyperparameters()
    for _ in range(2):  # also if the container starts again
        offer_data_to_ranks(hp, FlyteDirectory(str(digits)))
    identity = replace(IDENTITY, data=read_prepared_digest(digits))
    job = TrainingJob(resolve(hp), Path("/nowhere"))
    found = set_data_folder_on_host(
        Work("", job, Request(1), tmp_path, identity, read_settings())
    ).arguments.data_folder
    assert found.resolve() == digits.resolve()
