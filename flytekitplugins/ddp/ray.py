"""The Ray cluster that Flyte sets up for a task, whose worker nodes have the ranks."""

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

GPU_LABEL = "k8s.amazonaws.com/accelerator"  # Flyte's own default for plugins.k8s.gpu-device-node-label
SMALLEST_STORE = "80000000"  # bytes of Ray's object store, which takes /dev/shm from NCCL; ranks use no objects
HEAD = Size(cpu="1", memory="3Gi", ephemeral_storage="10Gi")
SUBMITTER = Size(cpu="500m", memory="256Mi", ephemeral_storage="1Gi")


def ray_cluster(
    nodes: int, resources: ResourceSpec, shared_memory: str = "", gpu_type: str = "", *, with_secrets: bool = False
) -> RayJobConfig:
    """Return the plugin's configuration of a cluster with a small head, on which no rank runs, and ``nodes`` workers.

    ``resources`` and ``shared_memory`` (of /dev/shm; "": limited by its memory) are each worker's. ``gpu_type`` is the
    value of the nodes' label for their GPU; "" takes any.
    """
    given = {kind: kubernetes_resources(getattr(resources, kind)) for kind in ("requests", "limits")}
    container = {
        "name": "ray-worker",
        "resources": {kind: amounts for kind, amounts in given.items() if amounts},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108 (no file of ours)
    }
    limit = {"sizeLimit": shared_memory} if shared_memory else {}
    volume = {"name": "shm", "emptyDir": {"medium": "Memory", **limit}}
    # A dictionary, as importing Kubernetes' client takes a second.
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
    """A task whose ranks are on the nodes of a Ray cluster, launched from its head."""

    def __init__(self, config: DDP, function: Function, **options: Any) -> None:
        node = take_resources(options)
        self.num_hosts = config.nodes
        self.num_ranks = config.num_ranks or config.nodes * count_ranks_per_node(node)
        size = options["shared_memory"] if isinstance(options["shared_memory"], str) else ""
        gpu = options["accelerator"].to_flyte_idl().device if options["accelerator"] else ""
        secrets = bool(options["secret_requests"])
        cluster = ray_cluster(config.nodes, node, size, gpu, with_secrets=secrets)
        options |= {**requests_and_limits(SUBMITTER), "accelerator": None, "shared_memory": None}
        super().__init__(cluster, function, **options)
