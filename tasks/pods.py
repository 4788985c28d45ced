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
ENGINE_RETRIES = 2  # an engine's own, on the hosts that it has; Flyte's would set up another cluster


def light_pod(disk: str = "") -> dict[str, Any]:
    """Return the options of a task that looks at inputs or an index: a small pod without GPUs.

    Args:
        disk: Size of its disk. Empty takes the profile's for such pods.
    """
    _, profile = chosen_profile()
    limits = replace(profile.light, ephemeral_storage=disk or profile.light.ephemeral_storage)
    requests = replace(limits, cpu="500m", memory="1Gi")
    return pod_options(requests, limits, environment=variables.pod_environment(), hours=1)


def checking_pod() -> dict[str, Any]:
    """Return the options of a task that checks a training or a release: a light pod with the registry and a deck."""
    return {**with_registry(light_pod()), **WITH_DECK}


def storing_pod() -> dict[str, Any]:
    """Return the options of a task that puts a version into the registry: a light pod with a large disk."""
    _, profile = chosen_profile()
    return with_registry(light_pod(disk=profile.data.ephemeral_storage))


def promoting_pod() -> dict[str, Any]:
    """Return the options of a task that makes a version the champion: a storing pod with wandb's settings and key."""
    options = storing_pod()
    told = {**options["environment"], **variables.wandb_environment()}
    return {**options, "environment": told, "secret_requests": secrets()}


def data_pod() -> dict[str, Any]:
    """Return the options of a task that reads all data to fetch, pack, index or check them, without GPUs."""
    _, profile = chosen_profile()
    return pod_options(profile.data, environment=variables.pod_environment())


def prediction_pod() -> dict[str, Any]:
    """Return the options of a task that applies a model: one GPU of the profile with its share, or all without GPUs."""
    _, profile = chosen_profile()
    told = {**variables.pod_environment(), **variables.cache_limit(), REQUESTED_GPUS: str(min(1, profile.gpus))}
    size = split_size(profile, max(1, profile.gpus))
    options = with_registry(pod_options(size, environment=told, template=profile.pod_template))
    return {**options, "accelerator": accelerator(), **WITH_DECK}


def training_pod() -> dict[str, Any]:
    """Return the options of a training task whose ranks are in its own pod."""
    _, profile = chosen_profile()
    return {**launching_pod(profile), "accelerator": accelerator(), "shared_memory": profile.shared_memory}


def launching_pod(size: Size) -> dict[str, Any]:
    """Return the options of a training task whose ranks are in other pods, which it launches."""
    _, profile = chosen_profile()
    return {
        **pod_options(size, environment=variables.training_environment(), template=profile.pod_template),
        "secret_requests": secrets(),
        "interruptible": profile.interruptible,
        "retries": read_whole_number("FLYTE_DDP_RETRIES"),  # without progress fewer: CheckpointStore.stop_if_futile
        "cache": by_content(ignored_inputs=("data",)),  # whose address always differs; run_version has their version
        **WITH_DECK,
    }


def pod_options(
    requests: Size,
    limits: Optional[Size] = None,
    *,
    environment: dict[str, str],
    template: Optional[str] = None,
    hours: Optional[float] = None,
) -> dict[str, Any]:
    """Return the options that every task has.

    Args:
        requests: What the pod requests.
        limits: What it may take. None is what it requests, so that it is not evicted for memory.
        environment: Its variables.
        template: Name of a pod template in the cluster. None is the one that FLYTE_DDP_POD_TEMPLATE names, if any.
        hours: After which an attempt is stopped. None is what FLYTE_DDP_HOURS says.
    """
    return {
        "requests": resources(requests),
        "limits": resources(limits or requests),
        "pod_template": RestrictedPod(),
        "pod_template_name": template or read_text("FLYTE_DDP_POD_TEMPLATE") or None,
        "environment": environment,
        "timeout": timedelta(hours=hours or read_number("FLYTE_DDP_HOURS")),
        "retries": 2,
    }


def with_registry(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a task that reads or writes the registry of models."""
    return {**options, "environment": {**options["environment"], **variables.registry_environment()}}


def resources(size: Size) -> Resources:
    """Return a size as flytekit has it."""
    gpu = str(size.gpus) if size.gpus else None
    return Resources(cpu=size.cpu, mem=size.memory, gpu=gpu, ephemeral_storage=size.ephemeral_storage)


def requests_and_limits(size: Size) -> dict[str, Resources]:
    """Return a size as the options of an engine's pods that request and limit it."""
    return {"requests": resources(size), "limits": resources(size)}


def accelerator() -> Optional[GPUAccelerator]:
    """Return the profile's type of GPU; None if any will do."""
    _, profile = chosen_profile()
    return GPUAccelerator(profile.gpu_type) if profile.gpu_type else None


def secrets() -> list[Secret]:
    """Return the secret with wandb's key, or nothing where pods are given none."""
    named = variables.wandb_secret()
    return [Secret(*named, mount_requirement=Secret.MountType.ENV_VAR)] if named else []


def by_content(ignored_inputs: tuple[str, ...] = (), code: str = "") -> Cache:
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
