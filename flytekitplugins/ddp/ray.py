"""The Ray cluster that Flyte sets up for a task. The ranks run on the worker nodes."""

from typing import Any

from flytekit import PodTemplate
from flytekit.core.resources import ResourceSpec
from flytekitplugins.ray import HeadNodeConfig, RayJobConfig, WorkerNodeConfig
from flytekitplugins.ray.task import RayFunctionTask

from flyte_ddp.pods.profiles import Size
from flytekitplugins.ddp import DDP
from flytekitplugins.ddp.resources import (
    count_ranks_per_node,
    kubernetes_resources,
    requests_and_limits,
    take_resources,
)
from flytekitplugins.ddp.task import EngineTask, Function

GPU_LABEL = "k8s.amazonaws.com/accelerator"  # Flyte's default for plugins.k8s.gpu-device-node-label
SMALLEST_STORE = "80000000"  # bytes of Ray's object store, which reduces NCCL's /dev/shm; ranks use no objects
HEAD = Size(cpu="1", memory="3Gi", ephemeral_storage="10Gi")
SUBMITTER = Size(cpu="500m", memory="256Mi", ephemeral_storage="1Gi")


def make_ray_cluster(
    nodes: int, resources: ResourceSpec, shared_memory: str = "", gpu_type: str = "", *, with_secrets: bool = False
) -> RayJobConfig:
    """Return the configuration of a cluster with a small head, on which no rank runs, and ``nodes`` workers.

    Args:
        nodes: Number of workers.
        resources: Requests and limits of each worker.
        shared_memory: Size of /dev/shm of each worker. "" limits the size by the worker's memory only.
        gpu_type: Value of the GPU label of the nodes. "" accepts any GPU.
        with_secrets: Whether Flyte may add secrets to the workers.
    """
    given = {kind: kubernetes_resources(getattr(resources, kind)) for kind in ("requests", "limits")}
    container = {
        "name": "ray-worker",
        "resources": {kind: amounts for kind, amounts in given.items() if amounts},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108 (no file of ours)
    }
    limit = {"sizeLimit": shared_memory} if shared_memory else {}
    volume = {"name": "shm", "emptyDir": {"medium": "Memory", **limit}}
    # A dictionary, because importing Kubernetes' client takes a second.
    spec: dict[str, Any] = {"containers": [container], "volumes": [volume]}
    if gpu_type:  # as Flyte does for pods of tasks
        taint = {"key": GPU_LABEL, "operator": "Equal", "value": gpu_type, "effect": "NoSchedule"}
        spec |= {"nodeSelector": {GPU_LABEL: gpu_type}, "tolerations": [taint]}
    # The label keeps Flyte's webhook from adding secrets.
    template = PodTemplate(spec, labels=None if with_secrets else {"inject-flyte-secrets": "false"})
    options = {"object-store-memory": SMALLEST_STORE}
    return RayJobConfig(
        head_node_config=HeadNodeConfig({"num-cpus": "0"}, **requests_and_limits(HEAD)),
        worker_node_config=[WorkerNodeConfig("ranks", nodes, ray_start_params=options, pod_template=template)],
        shutdown_after_job_finishes=True,
    )


class RayTask(EngineTask, RayFunctionTask):  # type: ignore[misc]  # which the plugin leaves untyped
    """A task whose ranks run on the nodes of a Ray cluster, launched from the head."""

    def __init__(self, config: DDP, function: Function, **options: Any) -> None:
        node = take_resources(options)
        self.num_hosts = config.nodes
        self.num_ranks = config.num_ranks or config.nodes * count_ranks_per_node(node)
        size = options["shared_memory"] if isinstance(options["shared_memory"], str) else ""
        gpu = options["accelerator"].to_flyte_idl().device if options["accelerator"] else ""
        secrets = bool(options["secret_requests"])
        cluster = make_ray_cluster(config.nodes, node, size, gpu, with_secrets=secrets)
        options |= {**requests_and_limits(SUBMITTER), "accelerator": None, "shared_memory": None}
        super().__init__(cluster, function, **options)
