"""The training task on Ray: a cluster that Flyte sets up for the run, or a running one, or locally this machine."""

from functools import partial
from pathlib import Path
from typing import Any

from flytekit import PodTemplate
from flytekit.types.directory import FlyteDirectory
from flytekitplugins.ray import HeadNodeConfig, RayJobConfig, WorkerNodeConfig

from flyte_ddp.config import Hyperparameters
from flyte_ddp.hardware import choose_hardware, request_ranks
from flyte_ddp.pods.platforms import is_in_pod
from flyte_ddp.pods.profiles import Size, chosen_profile, node_range
from flyte_ddp.run import Result, run_training
from flyte_ddp.settings import Settings
from tasks import pods
from tasks.flyte import flyte_task
from tasks.training import TrainingOutputs, train_in_run_folder, training_outputs

GPU_LABEL = "k8s.amazonaws.com/accelerator"  # Flyte's own default for plugins.k8s.gpu-device-node-label
SMALLEST_STORE = "80000000"  # bytes of Ray's object store, which takes /dev/shm from NCCL; ranks use no objects
HEAD = Size(cpu="1", memory="3Gi", ephemeral_storage="10Gi")
SUBMITTER = Size(cpu="500m", memory="256Mi", ephemeral_storage="1Gi")


def node_template() -> PodTemplate:
    """Return the pod template of the ranks' nodes: the profile's resources, its type of GPU, and /dev/shm.

    The specification is a dictionary, as importing Kubernetes' client takes a second. The label keeps Flyte's webhook
    from adding secrets, which ranks do not read.
    """
    profile = chosen_profile()
    resources = {"cpu": profile.cpu, "memory": profile.memory, "ephemeral-storage": profile.ephemeral_storage}
    if profile.gpus:
        resources["nvidia.com/gpu"] = str(profile.gpus)
    container = {
        "name": "ray-worker",
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108 (no file of ours)
    }
    volume = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": profile.shared_memory}}
    spec: dict[str, Any] = {"containers": [container], "volumes": [volume]}
    if profile.gpu_type:  # as Flyte does for pods of tasks
        taint = {"key": GPU_LABEL, "operator": "Equal", "value": profile.gpu_type, "effect": "NoSchedule"}
        spec |= {"nodeSelector": {GPU_LABEL: profile.gpu_type}, "tolerations": [taint]}
    return PodTemplate(spec, labels={"inject-flyte-secrets": "false"})


# No rank runs on the head. KubeRay starts the job when all nodes are there, so the lower end of a range has no use.
CLUSTER = RayJobConfig(
    head_node_config=HeadNodeConfig({"num-cpus": "0"}, **pods.requests_and_limits(HEAD)),
    worker_node_config=[
        WorkerNodeConfig(
            "ranks",
            replicas=node_range()[1],
            ray_start_params={"object-store-memory": SMALLEST_STORE},
            pod_template=node_template(),
        )
    ],
    shutdown_after_job_finishes=True,
)


@flyte_task(task_config=CLUSTER, **pods.launching_pod(SUBMITTER))
def train_on_ray(hp: Hyperparameters, data: FlyteDirectory, run_version: str) -> TrainingOutputs:
    """Train an image classifier on a Ray cluster that Flyte sets up for this task, with a GPU for each rank, or CPUs.

    Give the hyperparameters, the data and the run version that check_inputs returns. Returns accuracies, weights,
    sidecar, report and metrics, as train_model does. A local run uses the cluster in RAY_ADDRESS, or a new one.
    """
    return training_outputs(train_in_run_folder(hp, data, run_version, launch_on_ray))


def launch_on_ray(hp: Hyperparameters, data: Path, run_folder: Path, settings: Settings) -> Result:
    """Train on the Ray cluster to which Flyte's plugin has connected this process, and return the result.

    Raises UnreachableError if a pod's cluster does not get its nodes within FLYTE_DDP_TIMEOUT.
    """
    from flyte_ddp.launch import ray

    nodes = node_range()[1] if is_in_pod() else 0
    with ray.connected():
        launch = partial(ray.launch, max_retries=pods.ENGINE_RETRIES)
        capacity = ray.find_capacity(request_ranks(hp), nodes, settings.timeout)
        return run_training(hp, data, run_folder, settings, launch=launch, hardware=choose_hardware(hp, capacity))
