"""What tasks get from the cluster: resources, GPUs, secrets, environment, pod template, retries and cache policy."""

from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Optional

from flytekit import Cache, PodTemplate, Resources, Secret
from flytekit.extras.accelerators import GPUAccelerator

from flyte_ddp.code_digest import library_digest
from flyte_ddp.pods import environment as variables
from flyte_ddp.pods.profiles import Size, chosen_profile, split_size
from flyte_ddp.settings import REQUESTED_GPUS, read_number, read_text, read_whole_number

if TYPE_CHECKING:
    from kubernetes.client import V1PodSpec

WITH_DECK: dict[str, Any] = {"enable_deck": True, "deck_fields": ()}  # with pages of the task's own only
Told = Optional[dict[str, str]]  # variables of a pod's environment
ENGINE_RETRIES = 2  # an engine's own, on the hosts that it has; Flyte's would set up another cluster


def light_pod(told: Told = None, disk: str = "") -> dict[str, Any]:
    """Return the options of a task that looks at inputs or an index: a small pod without GPUs.

    Args:
        told: Variables besides those of every pod.
        disk: Size of its disk. Empty takes the profile's for such pods.
    """
    limits = chosen_profile().light
    limits = replace(limits, ephemeral_storage=disk or limits.ephemeral_storage)
    return pod_options(limits, told, requests=replace(limits, cpu="500m", memory="1Gi"), hours=1)


def checking_pod() -> dict[str, Any]:
    """Return the options of a task that checks a training or a release: a light pod with the registry and a deck."""
    return {**light_pod(variables.registry_environment()), **WITH_DECK}


def storing_pod(told: Told = None) -> dict[str, Any]:
    """Return the options of a task that puts a version into the registry: a light pod with a large disk."""
    told = {**variables.registry_environment(), **(told or {})}
    return light_pod(told, disk=chosen_profile().data.ephemeral_storage)


def promoting_pod() -> dict[str, Any]:
    """Return the options of a task that makes a version the champion: a storing pod with wandb's settings and key."""
    return {**storing_pod(variables.wandb_environment()), "secret_requests": secrets()}


def data_pod() -> dict[str, Any]:
    """Return the options of a task that reads all data to fetch, pack, index or check them, without GPUs."""
    return pod_options(chosen_profile().data)


def prediction_pod() -> dict[str, Any]:
    """Return the options of a task that applies a model: one GPU of the profile with its share, or all without GPUs."""
    profile = chosen_profile()
    told = variables.cache_limit() | variables.registry_environment() | {REQUESTED_GPUS: str(min(1, profile.gpus))}
    options = pod_options(split_size(profile, max(1, profile.gpus)), told, template=profile.pod_template)
    return {**options, "accelerator": accelerator(), **WITH_DECK}


def training_pod() -> dict[str, Any]:
    """Return the options of a training task whose ranks are in its own pod."""
    profile = chosen_profile()
    return {**launching_pod(profile), "accelerator": accelerator(), "shared_memory": profile.shared_memory}


def launching_pod(size: Size) -> dict[str, Any]:
    """Return the options of a training task whose ranks are in other pods, which it launches."""
    profile = chosen_profile()
    return {
        **pod_options(size, variables.training_environment(), template=profile.pod_template),
        "secret_requests": secrets(),
        "interruptible": profile.interruptible,
        "retries": read_whole_number("FLYTE_DDP_RETRIES"),  # without progress fewer: CheckpointStore.stop_if_futile
        "cache": cache_by_content(
            ignored_inputs=("data",)
        ),  # whose address always differs; run_version has their version
        **WITH_DECK,
    }


def pod_options(
    size: Size, told: Told = None, *, requests: Optional[Size] = None, template: Optional[str] = None, hours: float = 0
) -> dict[str, Any]:
    """Return the options that every task has.

    Args:
        size: What the pod may take.
        told: Variables besides those of every pod.
        requests: What it requests. None is all that it may take, so that it is not evicted for memory.
        template: Name of a pod template in the cluster. None is what FLYTE_DDP_POD_TEMPLATE says.
        hours: After which an attempt is stopped. 0 is what FLYTE_DDP_HOURS says.
    """
    return {
        "requests": resources(requests or size),
        "limits": resources(size),
        "pod_template": RestrictedPod(),
        "pod_template_name": template or read_text("FLYTE_DDP_POD_TEMPLATE") or None,
        "environment": {**variables.pod_environment(), **(told or {})},
        "timeout": timedelta(hours=hours or read_number("FLYTE_DDP_HOURS")),
        "retries": 2,
    }


def resources(size: Size) -> Resources:
    """Return a size as flytekit has it."""
    gpu = str(size.gpus) if size.gpus else None
    return Resources(cpu=size.cpu, mem=size.memory, gpu=gpu, ephemeral_storage=size.ephemeral_storage)


def requests_and_limits(size: Size) -> dict[str, Resources]:
    """Return a size as the options of an engine's pods that request and limit it."""
    return {"requests": resources(size), "limits": resources(size)}


def accelerator() -> Optional[GPUAccelerator]:
    """Return the profile's type of GPU; None if any will do."""
    gpu_type = chosen_profile().gpu_type
    return GPUAccelerator(gpu_type) if gpu_type else None


def secrets() -> list[Secret]:
    """Return the secret with wandb's key, or nothing where pods are given none."""
    named = variables.wandb_secret()
    return [Secret(*named, mount_requirement=Secret.MountType.ENV_VAR)] if named else []


def cache_by_content(ignored_inputs: tuple[str, ...] = (), code: str = "") -> Cache:
    """Return a cache by inputs and library sources, in which equal executions at a time run once.

    Args:
        ignored_inputs: Inputs that do not count.
        code: Digest of sources. Empty takes those that training may import.
    """
    return Cache(version=code or library_digest(), ignored_inputs=ignored_inputs, serialize=True)


class RestrictedPod(PodTemplate):  # type: ignore[misc]
    """The pod template of every task, with what Kubernetes' PodSecurity level "restricted" asks of a pod.

    flytekit puts the task's image, command, resources and environment into its container. Flyte then merges the
    cluster's pod template that the task names, and makes the pods of PyTorchJobs, RayJobs and DaskJobs from the result.
    """

    def __init__(self) -> None:
        """Set no field: pod_spec is made below, and the others keep their defaults."""

    @cached_property
    def pod_spec(self) -> "V1PodSpec":
        """Make the specification when a task is serialized.

        Only then: importing Kubernetes' client takes a second, which local runs and pods save.
        """
        from kubernetes import client

        container = client.V1SecurityContext(
            allow_privilege_escalation=False, capabilities=client.V1Capabilities(drop=["ALL"])
        )
        pod = client.V1PodSecurityContext(
            run_as_non_root=True, seccomp_profile=client.V1SeccompProfile(type="RuntimeDefault")
        )
        primary = client.V1Container(
            name=self.primary_container_name,
            security_context=container,
            termination_message_policy="FallbackToLogsOnError",  # so that a lost pod's last lines are its error
        )
        return client.V1PodSpec(containers=[primary], security_context=pod)
