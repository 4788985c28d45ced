"""The training task on Ray: a cluster that Flyte sets up for the run, or a running one, or locally this machine."""

from functools import partial
from pathlib import Path
from typing import Any

from flytekit import PodTemplate, Resources, task
from flytekit.types.directory import FlyteDirectory
from flytekitplugins.ray import HeadNodeConfig, RayJobConfig, WorkerNodeConfig

from flyte_ddp.config import Hyperparameters
from flyte_ddp.run import Result, run_training
from flyte_ddp.settings import Settings
from tasks import places, pods, recovery
from tasks.training import TrainingOutputs, outputs, trained

GPU_LABEL = "k8s.amazonaws.com/accelerator"  # Flyte's own default for plugins.k8s.gpu-device-node-label
SMALLEST_STORE = "80000000"  # bytes; ranks do not use Ray's objects, and those would not fit into /dev/shm
HEAD = Resources(cpu="1", mem="3Gi", ephemeral_storage="10Gi")
SUBMITTER = Resources(cpu="500m", mem="256Mi", ephemeral_storage="1Gi")


def cluster() -> RayJobConfig:
    """A head, which launches and takes no ranks, and nodes of the profile's size: of a range as many as there may be.

    KubeRay starts the job when all nodes are there, so that a range would mean nothing.
    """
    return RayJobConfig(
        head_node_config=HeadNodeConfig({"num-cpus": "0"}, **pods.exactly(HEAD)),
        worker_node_config=[
            WorkerNodeConfig(
                "ranks",
                replicas=pods.nodes()[1],
                ray_start_params={"object-store-memory": SMALLEST_STORE},
                pod_template=of_a_node(),
            )
        ],
        shutdown_after_job_finishes=True,
    )


def of_a_node() -> PodTemplate:
    """What a node gets that the head and the submitter have not; as plain data, which needs no Kubernetes client.

    Its label has Flyte's webhook leave it alone: it reads no secret.
    """
    profile = pods.PROFILES[pods.chosen_profile()]
    resources = {"cpu": profile.cpu, "memory": profile.memory, "ephemeral-storage": profile.ephemeral_storage}
    spec: dict[str, Any] = {}
    if profile.gpus:
        resources["nvidia.com/gpu"] = str(profile.gpus)
    if profile.gpu_type:  # as Flyte does for pods of tasks
        device = profile.gpu_type.to_flyte_idl().device
        taint = {"key": GPU_LABEL, "operator": "Equal", "value": device, "effect": "NoSchedule"}
        spec = {"nodeSelector": {GPU_LABEL: device}, "tolerations": [taint]}
    spec["volumes"] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": profile.shared_memory}}]
    spec["containers"] = [
        {
            "name": "ray-worker",
            "resources": {"requests": resources, "limits": resources},
            "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108 (no file of ours)
        }
    ]
    return PodTemplate(spec, labels={"inject-flyte-secrets": "false"})


@recovery.mistakes_in_inputs
@task(task_config=cluster(), **pods.launching_pod(SUBMITTER))
def train_on_ray(hp: Hyperparameters, data: FlyteDirectory, run_version: str) -> TrainingOutputs:
    """Train a model with distributed data parallelism on a Ray cluster, a GPU for each rank, or CPUs.

    Returns what train_model returns.
    """
    return outputs(trained(hp, data, run_version, on_ray))


def on_ray(hp: Hyperparameters, data: Path, run_folder: Path, settings: Settings) -> Result:
    """Trains on the cluster that Ray is connected to, which Flyte's plugin sees to."""
    from flyte_ddp.launch import ray

    nodes = 0 if places.is_local() else pods.nodes()[1]
    with ray.connected():
        launch = partial(ray.launch, max_retries=pods.ENGINE_RETRIES)
        hardware = ray.hardware(hp, nodes, settings.timeout)
        return run_training(hp, data, run_folder, settings, launch=launch, hardware=hardware)
