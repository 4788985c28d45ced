"""Cluster options of tasks: resources, GPUs, secrets, environment, pod template, retries and cache policy."""

from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Optional

from flytekit import Cache, PodTemplate, Secret
from flytekit.extras.accelerators import GPUAccelerator

from flyte_ddp.core.settings import (
    REGISTRY_PODS,
    REQUESTED_GPUS,
    read_number_variable,
    read_text_variable,
    read_whole_number_variable,
)
from flyte_ddp.core.user_code.digest import library_digest
from flyte_ddp.pods import environment
from flyte_ddp.pods.profiles import Size, divide_size, read_profile
from flyte_ddp.pods.restricted_pod import make_restricted_pod_spec
from flytekitplugins.ddp.resources import TaskOptions, flytekit_resources

if TYPE_CHECKING:
    from kubernetes.client import V1PodSpec

WITH_DECK: TaskOptions = {"enable_deck": True, "deck_fields": ()}  # without the pages that flytekit would add


def registry_pod_options(disk: str = "") -> TaskOptions:
    """Return the options of a task that checks inputs or uses the registry.

    If ``disk`` is empty, the profile's disk size applies.
    """
    limits = read_profile().light
    limits = replace(limits, ephemeral_storage=disk or limits.ephemeral_storage)
    requests = replace(limits, cpu="500m", memory="1Gi")
    return pod_options(limits, environment.read_settings_for_pods(REGISTRY_PODS), requests=requests, hours=1)


def storing_pod_options() -> TaskOptions:
    return registry_pod_options(disk=read_profile().data.ephemeral_storage)


def data_pod_options() -> TaskOptions:
    return pod_options(read_profile().data)


def prediction_pod_options() -> TaskOptions:
    """Return the options of a task that applies a model.

    If the profile has GPUs, the pod gets one GPU and the matching share of CPUs and memory. Otherwise the pod gets the
    size of the profile.
    """
    profile = read_profile()
    variables = environment.make_cache_limit_variable() | environment.read_settings_for_pods(REGISTRY_PODS)
    variables[REQUESTED_GPUS] = str(min(1, profile.gpus))
    options = pod_options(divide_size(profile, max(1, profile.gpus)), variables, template=profile.pod_template)
    return {**options, "accelerator": make_gpu_accelerator(), **WITH_DECK}


def training_pod_options() -> TaskOptions:
    profile = read_profile()
    return {
        **launching_pod_options(profile),
        "accelerator": make_gpu_accelerator(),
        "shared_memory": profile.shared_memory,
    }


def launching_pod_options(size: Size) -> TaskOptions:
    """Return the options of a training task whose pod has this size.

    The pod launches the ranks in place or in other pods.

    Raises:
        UserError: A variable of the registration is wrong, such as FLYTE_DDP_PROFILE or FLYTE_DDP_RETRIES.
    """
    profile, secret = read_profile(), environment.read_wandb_secret_id()
    return {
        **pod_options(size, environment.make_training_environment(), template=profile.pod_template),
        "secret_requests": [Secret(*secret, mount_requirement=Secret.MountType.ENV_VAR)] if secret else [],
        "interruptible": profile.interruptible,
        # Attempts without progress end earlier: CheckpointStore.refuse_futile_attempt.
        "retries": read_whole_number_variable("FLYTE_DDP_RETRIES"),
        **WITH_DECK,
    }


def pod_options(
    size: Size,
    variables: Optional[dict[str, str]] = None,
    *,
    requests: Optional[Size] = None,
    template: Optional[str] = None,
    hours: float = 0,
) -> TaskOptions:
    """Return the options that all tasks share, for a pod of this size.

    Args:
        size: Limits of the pod.
        variables: Environment variables in addition to those of every pod.
        requests: Requested resources. None requests the limits, which avoids eviction for memory.
        template: Name of a pod template in the cluster. None uses FLYTE_DDP_POD_TEMPLATE.
        hours: Timeout. 0 uses FLYTE_DDP_HOURS.
    """
    return {
        "requests": flytekit_resources(requests or size),
        "limits": flytekit_resources(size),
        "pod_template": RestrictedPod(),
        "pod_template_name": template or read_text_variable("FLYTE_DDP_POD_TEMPLATE") or None,
        "environment": environment.make_pod_environment() | (variables or {}),
        "timeout": timedelta(hours=hours or read_number_variable("FLYTE_DDP_HOURS")),
        "retries": 2,
    }


def make_gpu_accelerator() -> Optional[GPUAccelerator]:
    name = read_profile().gpu_type
    return GPUAccelerator(name) if name else None


def training_cache() -> Cache:
    return cache_by_content(ignored_inputs=("data",))  # run_version identifies the data


def cache_by_content(ignored_inputs: tuple[str, ...] = (), code: str = "") -> Cache:
    """Return the setting by which Flyte caches results by inputs and source code.

    Of equal executions at the same time, only one runs. The rest reuse the result.

    Args:
        ignored_inputs: Inputs that do not change the result.
        code: Digest of the source code ("": of the library).
    """
    return Cache(version=code or library_digest(), ignored_inputs=ignored_inputs, serialize=True)


class RestrictedPod(PodTemplate):  # type: ignore[misc]
    """The pod template of every task, which satisfies Kubernetes' PodSecurity level "restricted".

    The task's image, command, resources and environment are added to the container by flytekit. Flyte then merges the
    cluster's pod template that the task names. From the result, Flyte makes the pods of PyTorchJobs, RayJobs and
    DaskJobs.
    """

    def __init__(self) -> None:
        """Set no field: pod_spec is a property, and the other fields keep their defaults."""

    @cached_property
    def pod_spec(self) -> "V1PodSpec":
        """The pod's specification, created on first use because importing Kubernetes' client takes a second."""
        return make_restricted_pod_spec(self.primary_container_name)
