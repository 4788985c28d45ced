"""Training on engines, as Flyte is given it: the specs that their plugins make, and what there is without a plugin."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import packaged
import pytest
import torch
import yaml
from cli import ROOT, pyflyte
from google.protobuf.json_format import MessageToDict
from packaged import Package
from s3_server import s3_server

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError
from flyte_ddp.pods.profiles import PROFILES, Size, parse_bytes, parse_quantity, split_size
from flyte_ddp.run import run_training
from flyte_ddp.settings import Settings
from tasks import dask_training, ray_training

ENGINES = ("elastic", "ray", "dask")
GPU_NODE = {"cpu": "8", "memory": "30Gi", "nvidia.com/gpu": "2", "ephemeral-storage": "20Gi"}


def task(package: Package, engine: str) -> Any:
    return package.tasks[f"tasks.{engine}_training.train_on_{engine}"].template


def custom(package: Package, engine: str) -> dict[str, Any]:
    return MessageToDict(task(package, engine).custom)


def resources(given: dict[str, Any]) -> dict[str, str]:
    """Requests and limits, which must be the same."""
    requests = {each["name"]: each["value"] for each in given["requests"]}
    assert requests == {each["name"]: each["value"] for each in given["limits"]}
    return requests


@pytest.mark.slow
def test_elastic_on_one_node_is_a_plain_pod(made: Callable[..., Package]) -> None:
    template = task(made(FLYTE_DDP_REGISTRY="s3://bucket/models"), "elastic")
    assert template.type == "python-task"
    assert not MessageToDict(template.custom)
    assert template.extended_resources.shared_memory.size_limit == "4Gi"
    assert template.metadata.retries.retries == 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "least", "most"), [("2", 2, 2), pytest.param("2:4", 2, 4, marks=pytest.mark.exhaustive)]
)
def test_elastic_on_several_is_a_pytorchjob(made: Callable[..., Package], nodes: str, least: int, most: int) -> None:
    template = task(made(FLYTE_DDP_NODES=nodes), "elastic")
    assert template.type == "pytorch"
    assert template.extended_resources.shared_memory.size_limit == "4Gi"
    assert "PodTemplate" not in str(template.config), "the plugin's own shared memory has no limit"
    assert custom(made(FLYTE_DDP_NODES=nodes), "elastic") == {
        "workerReplicas": {"replicas": most, "restartPolicy": "RESTART_POLICY_ON_FAILURE"},
        "elasticConfig": {
            "rdzvBackend": "c10d",
            "minReplicas": least,
            "maxReplicas": most,
            "nprocPerNode": 2,
            "maxRestarts": 2,
        },
        "runPolicy": {"cleanPodPolicy": "CLEANPOD_POLICY_RUNNING", "backoffLimit": 2 * most},
    }
    requests = {each.name: each.value for each in packaged.container(template).resources.requests}
    assert {each.name: each.value for each in packaged.container(template).resources.limits} == requests
    assert len(requests) == 4


@pytest.mark.slow
def test_flyte_makes_a_pytorchjob_of_it_as_the_profile_says(made: Callable[..., Package]) -> None:
    """As Flyte 1.16.8 made one on a cluster with the pod template of deploy/; what it is given today is the same."""
    job = yaml.safe_load((Path(__file__).parent / "recorded/elastic-gpu.yaml").read_text())["spec"]
    worker = job["pytorchReplicaSpecs"]["Worker"]
    pod, profile = worker["template"]["spec"], PROFILES["gpu"]
    given = custom(made(FLYTE_DDP_NODES="2"), "elastic")
    assert (worker["replicas"], worker["restartPolicy"]) == (given["workerReplicas"]["replicas"], "OnFailure")
    today = {name.replace("nprocPerNode", "nProcPerNode"): value for name, value in given["elasticConfig"].items()}
    assert job["elasticPolicy"] == today
    assert job["elasticPolicy"]["nProcPerNode"] == profile.gpus
    assert job["runPolicy"]["backoffLimit"] == given["runPolicy"]["backoffLimit"]
    assert job["runPolicy"]["cleanPodPolicy"] == "Running"
    (container,) = pod["containers"]
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert container["resources"]["limits"] == {
        "cpu": profile.cpu,
        "memory": profile.memory,
        "ephemeral-storage": profile.ephemeral_storage,
        "nvidia.com/gpu": str(profile.gpus),
    }
    (volume,) = pod["volumes"]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": profile.shared_memory}
    assert container["volumeMounts"] == [{"mountPath": "/dev/shm", "name": volume["name"]}]
    template = yaml.safe_load((ROOT / "deploy/pod-template.yaml").read_text())
    assert template["metadata"]["name"] == profile.pod_template
    ours = template["template"]["spec"]
    for field in ("tolerations", "terminationGracePeriodSeconds"):
        assert pod[field] == ours[field]
    assert container["imagePullPolicy"] == ours["containers"][0]["imagePullPolicy"]
    assert pod["securityContext"] == packaged.RESTRICTED_POD
    assert container["securityContext"] == packaged.RESTRICTED_CONTAINER
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    environment = {each["name"]: each["value"] for each in container["env"]}
    given_environment = {
        each.key: each.value for each in packaged.container(task(made(FLYTE_DDP_NODES="2"), "elastic")).env
    }
    assert environment.items() <= given_environment.items()


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "most"), [("2", 2), pytest.param("2:4", 4, marks=pytest.mark.exhaustive)])
def test_ray_nodes_have_the_profiles_size(made: Callable[..., Package], nodes: str, most: int) -> None:
    assert task(made(FLYTE_DDP_NODES=nodes), "ray").type == "ray"
    cluster = custom(made(FLYTE_DDP_NODES=nodes), "ray")["rayCluster"]
    assert "enableAutoscaling" not in cluster
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    head = cluster["headGroupSpec"]["k8sPod"]["podSpec"]["containers"][0]["resources"]
    assert head["requests"] == head["limits"] == {"cpu": "1", "memory": "3Gi", "ephemeral-storage": "10Gi"}
    (group,) = cluster["workerGroupSpec"]
    assert group["replicas"] == most
    worker = group["k8sPod"]["podSpec"]["containers"][0]["resources"]
    assert worker["requests"] == worker["limits"] == GPU_NODE
    assert custom(made(FLYTE_DDP_NODES=nodes), "ray")["shutdownAfterJobFinishes"]


@pytest.mark.slow
def test_pods_of_ray_are_as_the_profile_says(made: Callable[..., Package]) -> None:
    """As Flyte's plugin made them on a cluster, of what is still sent."""
    recorded = yaml.safe_load((ROOT / "tests/tasks/recorded/ray-gpu.yaml").read_text())["spec"]
    head = recorded["rayClusterSpec"]["headGroupSpec"]["template"]
    [group] = recorded["rayClusterSpec"]["workerGroupSpecs"]
    worker, submitter = group["template"], recorded["submitterPodTemplate"]
    of_all = yaml.safe_load((ROOT / "deploy/pod-template.yaml").read_text())["template"]["spec"]
    for pod in (head, worker, submitter):
        assert pod["spec"]["terminationGracePeriodSeconds"] == of_all["terminationGracePeriodSeconds"]
        assert pod["spec"]["securityContext"] == packaged.RESTRICTED_POD
        [container] = pod["spec"]["containers"]
        assert container["imagePullPolicy"] == of_all["containers"][0]["imagePullPolicy"]
        assert container["securityContext"] == packaged.RESTRICTED_CONTAINER
        assert pod["spec"]["tolerations"][:1] == of_all["tolerations"]
    profile = PROFILES["gpu-a100"]
    given = {"cpu": profile.cpu, "memory": profile.memory, "ephemeral-storage": profile.ephemeral_storage}
    [ranks] = worker["spec"]["containers"]
    assert ranks["resources"]["limits"] == ranks["resources"]["requests"] == {**given, "nvidia.com/gpu": "8"}
    assert worker["spec"]["nodeSelector"] == {"k8s.amazonaws.com/accelerator": "nvidia-tesla-a100"}
    [memory] = worker["spec"]["volumes"]
    assert memory["emptyDir"] == {"medium": "Memory", "sizeLimit": profile.shared_memory}
    assert ranks["volumeMounts"] == [{"name": memory["name"], "mountPath": "/dev/shm"}]
    assert [pod["metadata"]["labels"]["inject-flyte-secrets"] for pod in (head, worker, submitter)] == [
        *("true", "false", "true")  # the plugin makes all labels of the submitter those of the task
    ]
    for pod in (head, submitter):
        assert not {"nodeSelector", "volumes"} & set(pod["spec"])
        assert "nvidia.com/gpu" not in pod["spec"]["containers"][0]["resources"]["limits"]

    package = made(FLYTE_DDP_PROFILE="gpu-a100", FLYTE_DDP_NODES="2")
    sent = custom(package, "ray")["rayCluster"]
    for found, now in ((head, sent["headGroupSpec"]), (worker, sent["workerGroupSpec"][0])):
        spec = now["k8sPod"]["podSpec"]
        assert found["spec"]["containers"][0]["resources"] == spec["containers"][0]["resources"]
        assert found["spec"].get("nodeSelector") == spec.get("nodeSelector")
        assert found["spec"].get("volumes") == spec.get("volumes")
        assert found["spec"]["tolerations"][1:] == spec.get("tolerations", [])
        assert now["k8sPod"].get("metadata", {}).get("labels", {}).items() <= found["metadata"]["labels"].items()
    assert group["replicas"] == sent["workerGroupSpec"][0]["replicas"]
    assert task(package, "ray").metadata.pod_template_name == profile.pod_template
    small = {each.name: each.value for each in packaged.container(task(package, "ray")).resources.limits}
    assert sorted(small.values()) == sorted(submitter["spec"]["containers"][0]["resources"]["limits"].values())


def of_one_sandbox(sizes: list[Size]) -> bool:
    """Whether pods of these sizes fit into 4 cores and 8 GiB together."""
    memory = sum(parse_bytes(size.memory) for size in sizes)
    return sum(parse_quantity(size.cpu) for size in sizes) <= 4 and memory <= 8 * 2**30


def test_a_run_on_two_nodes_fits_into_a_sandbox() -> None:
    """On Ray two nodes; on Dask two workers of a rank each, as without GPUs."""
    node = PROFILES["sandbox"]
    assert of_one_sandbox([node, node, ray_training.HEAD, ray_training.SUBMITTER])
    assert of_one_sandbox([node, node, dask_training.SCHEDULER, dask_training.RUNNER])


@pytest.mark.slow
def test_dask_has_a_worker_for_each_gpu(made: Callable[..., Package]) -> None:
    assert task(made(FLYTE_DDP_NODES="2"), "dask").type == "dask"
    spec = custom(made(FLYTE_DDP_NODES="2"), "dask")
    assert spec["workers"]["numberOfWorkers"] == 4
    found = resources(spec["workers"]["resources"])
    assert found == {"CPU": "4", "MEMORY": "15360Mi", "GPU": "1", "EPHEMERAL_STORAGE": "20Gi"}
    assert resources(spec["scheduler"]["resources"]) == {"CPU": "500m", "MEMORY": "512Mi", "EPHEMERAL_STORAGE": "1Gi"}


def test_a_daskjob_for_gpus_is_as_the_profile_says() -> None:
    """As Flyte made it on a cluster; its plugin makes all pods from one, but for their resources."""
    job = yaml.safe_load((ROOT / "tests/tasks/recorded/dask-gpu.yaml").read_text())["spec"]
    template = yaml.safe_load((ROOT / "deploy/pod-template.yaml").read_text())["template"]["spec"]
    profile, cluster = PROFILES["gpu"], job["cluster"]["spec"]
    assert cluster["worker"]["replicas"] == 2 * profile.gpus
    asked = {
        "worker": split_size(profile, profile.gpus),
        "scheduler": dask_training.SCHEDULER,
        "runner": dask_training.RUNNER,
    }
    for kind, pod in {**cluster, "runner": job["job"]}.items():
        spec, wanted = pod["spec"], asked[kind]
        for field in ("tolerations", "terminationGracePeriodSeconds"):
            assert spec[field] == template[field], (kind, field)
        assert spec["securityContext"] == packaged.RESTRICTED_POD
        assert spec["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": profile.shared_memory}
        [container] = spec["containers"]
        assert container["volumeMounts"] == [{"mountPath": "/dev/shm", "name": spec["volumes"][0]["name"]}]
        assert container["securityContext"] == packaged.RESTRICTED_CONTAINER
        found = container["resources"]["requests"]
        assert found == container["resources"]["limits"]
        assert found.get("nvidia.com/gpu", "0") == str(wanted.gpus)
        assert parse_quantity(found["cpu"]) == parse_quantity(wanted.cpu)
        assert parse_bytes(found["memory"]) == parse_bytes(wanted.memory)
        assert found["ephemeral-storage"] == wanted.ephemeral_storage


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_tasks_are_as_the_main_one(made: Callable[..., Package], engine: str) -> None:
    package = made(FLYTE_DDP_REGISTRY="s3://bucket/models")
    mine, main = task(package, engine), package.tasks["tasks.training.train_model"].template
    assert mine.interface == main.interface
    assert (mine.metadata.discoverable, mine.metadata.discovery_version) == (True, main.metadata.discovery_version)
    assert mine.metadata.generates_deck.value
    assert mine.metadata.timeout == main.metadata.timeout
    assert packaged.container(mine).image == packaged.container(main).image
    assert [*packaged.container(mine).env] == [*packaged.container(main).env]
    assert mine.security_context == main.security_context
    assert f"workflows.{engine}_training.{engine}_training_wf" in package.workflows


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_inputs_are_checked_by_what_the_engine_will_get(made: Callable[..., Package], engine: str) -> None:
    nodes = (
        made(FLYTE_DDP_REGISTRY="s3://bucket/models")
        .workflows[f"workflows.{engine}_training.{engine}_training_wf"]
        .template.nodes
    )
    [node] = [node for node in nodes if node.task_node.reference_id.name == "tasks.preparation.check_inputs"]
    bound = {binding.var: binding.binding for binding in node.inputs}
    assert bound["engine"].scalar.primitive.string_value == engine


@pytest.mark.slow
def test_no_package_is_made_for_a_number_of_nodes_that_cannot_be(tmp_path: Path) -> None:
    ended, _ = packaged.make(tmp_path, FLYTE_DDP_NODES="4:2")
    assert ended.exit_code == 1
    assert "FLYTE_DDP_NODES='4:2': must be a number of nodes" in " ".join(ended.output.split())


@pytest.mark.slow
def test_without_the_plugins_there_is_the_rest(tmp_path: Path) -> None:
    blocked = "import sys\n" + "".join(
        f"sys.modules['flytekitplugins.{name}'] = None\n" for name in ("kfpytorch", "ray", "dask")
    )
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(blocked)
    ended, package = packaged.make(tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert ended.exit_code == 0, ended.output
    assert "workflows.training.training_wf" in package.workflows
    assert not [name for name in (*package.workflows, *package.tasks) if any(engine in name for engine in ENGINES)]
    for engine in ENGINES:
        assert f"{engine}_training_wf is left out" in ended.output
        assert f"uv pip install -e '.[{engine}]'" in ended.output
    missing = pyflyte(
        *("run", str(ROOT / "workflows/ray_training.py"), "ray_training_wf"),
        home=tmp_path,
        PYTHONPATH=str(tmp_path / "site"),
    )
    assert missing.exit_code == 1
    assert "Traceback" not in missing.output
    assert "flytekitplugins.ray is not installed" in missing.panel
    assert "uv pip install -e '.[ray]'" in missing.panel


@pytest.mark.parametrize(("engine", "package"), [("ray", "ray"), ("dask", "distributed")])
def test_a_launcher_without_its_engine_says_what_to_install(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, package: str
) -> None:
    launcher = importlib.import_module(f"flyte_ddp.launch.{engine}")
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    settings = Settings(progress="off", wandb_mode="disabled")
    with pytest.raises(UserError, match=rf"{package}.* is not installed: .*uv pip install -e '\.\[{engine}\]'"):
        run_training(Hyperparameters(num_ranks=2), digits, tmp_path / "run", settings, launch=launcher.launch)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the main workflow."""
    return train("training", "training", tmp_path_factory.mktemp("main"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine", ["dask", *[pytest.param(name, marks=pytest.mark.exhaustive) for name in ("elastic", "ray")]]
)
def test_pyflyte_run_trains_the_same_model(expected: Path, tmp_path: Path, engine: str) -> None:
    found = torch.load(train(f"{engine}_training", f"{engine}_training", tmp_path), weights_only=True)
    main = torch.load(expected, weights_only=True)
    assert all(torch.equal(main[name], found[name]) for name in main)


def train(module: str, workflow: str, folder: Path) -> Path:
    """Runs a workflow, with two ranks on CPUs; its model."""
    hp = json.dumps({"num_ranks": 2, "max_steps": 5, "backend": "gloo", "precision": "fp32"})
    ended = pyflyte(
        *("run", str(ROOT / f"workflows/{module}.py"), f"{workflow}_wf", "--hp", hp),
        home=folder / "home",
        runs=folder / "runs",
        FLYTE_DDP_PROFILE="local",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_AUTH_MODE="disabled",
    )
    assert ended.exit_code == 0, ended.output
    (model,) = (folder / "runs").glob("*/model.pt")
    return model


DOWNLOADS = """
import sys
from pathlib import Path
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.models.core.types import BlobType
from flytekit.models.literals import Blob, BlobMetadata, Literal, Scalar
from flytekit.types.directory import FlyteDirectory
from tasks.elastic_training import download_data

kind = BlobType("", BlobType.BlobDimensionality.MULTIPART)
given = Literal(scalar=Scalar(blob=Blob(metadata=BlobMetadata(kind), uri=sys.argv[1])))
data = TypeEngine.to_python_value(FlyteContextManager.current_context(), given, FlyteDirectory)
download_data(data, Path(sys.argv[2]))
"""


@pytest.mark.slow
def test_hosts_without_rank_0_get_the_prepared_data_from_the_blob_store(digits: Path, tmp_path: Path) -> None:
    """As Flyte hands it to their pods."""
    shutil.copytree(digits, tmp_path / "served/flyte/prepared")
    fetched = tmp_path / "cache/digits"
    with s3_server(tmp_path / "served") as server:
        subprocess.run(
            [sys.executable, "-c", DOWNLOADS, "s3://flyte/prepared", str(fetched)],
            env={**os.environ, **server.flyte_environment(), "PYTHONPATH": str(ROOT)},
            check=True,
        )
    assert {path.name: path.read_bytes() for path in fetched.iterdir()} == {
        path.name: path.read_bytes() for path in digits.iterdir()
    }
