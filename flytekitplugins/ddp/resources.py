"""Convert sizes of pods (CPUs, memory, GPUs, disk) to the types of flytekit's plugins."""

from typing import Any

from flytekit import Resources
from flytekit.core.resources import ResourceSpec

from flyte_ddp.pods.profiles import Size, count_ranks_of_node, divide_size

TaskOptions = dict[str, Any]  # keyword arguments of flytekit's task, by name

ENGINE_RETRIES = 2  # retries by an engine, on the same hosts. A retry by Flyte would set up another cluster.


def flytekit_resources(size: Size) -> Resources:
    gpu = str(size.gpus) if size.gpus else None
    return Resources(cpu=size.cpu, mem=size.memory, gpu=gpu, ephemeral_storage=size.ephemeral_storage)


def requests_and_limits(size: Size) -> dict[str, Resources]:
    return {"requests": flytekit_resources(size), "limits": flytekit_resources(size)}


def kubernetes_resources(given: Resources) -> dict[str, str]:
    """Return the given amounts as texts by Kubernetes' names, such as "nvidia.com/gpu"."""
    names = {
        "cpu": given.cpu,
        "memory": given.mem,
        "ephemeral-storage": given.ephemeral_storage,
        "nvidia.com/gpu": given.gpu,
    }
    return {name: str(value) for name, value in names.items() if value is not None}


def divide_resources(given: Resources, parts: int) -> Resources:
    """Return 1/``parts`` of the CPUs, the memory and the GPUs, and the whole disk.

    CPUs are rounded down to thousandths, and memory to MiB. Amounts that are not given stay not given.
    """
    whole = Size(
        cpu=str(given.cpu or 1), memory=str(given.mem or "1Gi"), ephemeral_storage="", gpus=int(given.gpu or 0)
    )
    part = divide_size(whole, parts)
    return Resources(
        cpu=given.cpu and part.cpu,
        mem=given.mem and part.memory,
        gpu=str(part.gpus) if part.gpus else None,
        ephemeral_storage=given.ephemeral_storage,
    )


def take_resources(options: TaskOptions) -> ResourceSpec:
    """Remove ``requests``, ``limits`` and ``resources`` from a task's options, and return them as a ResourceSpec."""
    requests, limits, both = (options.pop(name, None) for name in ("requests", "limits", "resources"))
    if both is not None:
        return ResourceSpec.from_multiple_resource(both)
    return ResourceSpec(requests or Resources(), limits or Resources())


def count_requested_gpus(resources: ResourceSpec) -> int:
    return int(resources.requests.gpu or resources.limits.gpu or 0)  # without a request Kubernetes uses the limit


def count_ranks_per_node(resources: ResourceSpec) -> int:
    cpus = resources.requests.cpu or resources.limits.cpu or 1
    return count_ranks_of_node(count_requested_gpus(resources), str(cpus))
