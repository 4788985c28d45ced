"""What Flyte is given for a user's own task on an engine: the task's own resources, as our workflows make them."""

from typing import Any

import packaged
import pytest
from google.protobuf.json_format import MessageToDict
from pod import Cluster

from flyte_ddp.core.settings import REQUESTED_GPUS
from flytekitplugins.ddp.dask import RUNNER, SCHEDULER
from flytekitplugins.ddp.ray import HEAD, SUBMITTER

pytestmark = pytest.mark.slow


def template(cluster: Cluster, task: str) -> Any:
    return cluster.package.tasks[f"own.{task}"].template


def custom(cluster: Cluster, task: str) -> dict[str, Any]:
    return MessageToDict(template(cluster, task).custom)


def given(resources: Any) -> dict[str, str]:
    return {each["name"]: each["value"] for each in resources}


def own_pod(cluster: Cluster, task: str) -> dict[str, str]:
    return given(MessageToDict(packaged.container(template(cluster, task)).resources)["requests"])


def test_a_pod_of_ones_own_has_shared_memory_a_deck_and_time_to_save(cluster: Cluster) -> None:
    task = template(cluster, "train")
    assert (task.type, MessageToDict(task.custom)) == ("python-task", {})
    assert task.extended_resources.shared_memory.mount_path == "/dev/shm"
    assert task.metadata.generates_deck.value
    assert packaged.variables(task)["FLYTE_DDP_SAVE_SECONDS"] == "15"
    assert packaged.variables(task)["FLYTE_DDP_WANDB_SECRET"] == "off"
    assert REQUESTED_GPUS not in packaged.variables(task)


def test_wandbs_key_is_that_of_the_secret_that_the_task_requests(cluster: Cluster) -> None:
    assert packaged.variables(template(cluster, "go_on"))["FLYTE_DDP_WANDB_SECRET"] == "team/wandb-key"


def test_elastic_is_a_pytorchjob(cluster: Cluster) -> None:
    assert template(cluster, "on_elastic").type == "pytorch"
    assert custom(cluster, "on_elastic") == {
        "workerReplicas": {"replicas": 2, "restartPolicy": "RESTART_POLICY_ON_FAILURE"},
        "elasticConfig": {
            "rdzvBackend": "c10d",
            "minReplicas": 2,
            "maxReplicas": 2,
            "nprocPerNode": 1,
            "maxRestarts": 2,
        },
        "runPolicy": {"cleanPodPolicy": "CLEANPOD_POLICY_RUNNING", "backoffLimit": 4},
    }
    assert own_pod(cluster, "on_elastic") == {"CPU": "2", "MEMORY": "2Gi"}


def test_ray_is_a_cluster_whose_workers_have_the_tasks_resources(cluster: Cluster) -> None:
    assert template(cluster, "on_ray").type == "ray"
    spec = custom(cluster, "on_ray")["rayCluster"]
    [group] = spec["workerGroupSpec"]
    assert group["replicas"] == 2
    pod = group["k8sPod"]["podSpec"]
    assert pod["containers"][0]["resources"] == {"requests": {"cpu": "2", "memory": "2Gi"}, "limits": {"cpu": "4"}}
    assert pod["volumes"] == [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    [head] = spec["headGroupSpec"]["k8sPod"]["podSpec"]["containers"]
    assert head["resources"]["limits"]["memory"] == HEAD.memory
    assert own_pod(cluster, "on_ray")["MEMORY"] == SUBMITTER.memory


def test_dask_has_a_worker_for_each_gpu_with_its_share(cluster: Cluster) -> None:
    assert template(cluster, "on_dask").type == "dask"
    spec = custom(cluster, "on_dask")
    assert spec["workers"]["numberOfWorkers"] == 4
    assert given(spec["workers"]["resources"]["requests"]) == {"CPU": "1", "MEMORY": "1024Mi"}
    assert given(spec["workers"]["resources"]["limits"]) == {"CPU": "2", "MEMORY": "2048Mi", "GPU": "1"}
    assert given(spec["scheduler"]["resources"]["limits"])["MEMORY"] == SCHEDULER.memory
    assert own_pod(cluster, "on_dask")["MEMORY"] == RUNNER.memory
