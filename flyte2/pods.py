"""The environments of the tasks: image, resources, GPUs, secrets, variables, pod template and cache policy.

Each environment stands for a kind of pod. The profile (FLYTE_DDP_PROFILE) sets the sizes.
"""

import os
import sys
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

import flyte
from flyte import Cache, Device, PodTemplate, Resources, Secret, TaskEnvironment

from flyte_ddp.core.settings import (
    REGISTRY_PODS,
    REQUESTED_GPUS,
    read_number_variable,
    read_text_variable,
    read_whole_number_variable,
)
from flyte_ddp.core.user_code.digest import library_digest
from flyte_ddp.pods import environment
from flyte_ddp.pods.environment import FROM_SCRATCH_VARIABLE
from flyte_ddp.pods.platforms import is_in_pod
from flyte_ddp.pods.profiles import Profile, Size, divide_size, read_profile
from flyte_ddp.pods.restricted_pod import make_restricted_pod_spec
from flyteplugins.ddp import is_local_command

if TYPE_CHECKING:
    from kubernetes.client import V1PodSpec

IMAGE = flyte.Image.from_ref_name()  # which `flyte run --image` and `flyte deploy --image` set
RETRIES = 2


class RestrictedPod(PodTemplate):
    """The pod template of every task without a template in the cluster."""

    def __init__(self) -> None:
        super().__init__()

    @cached_property
    def pod_spec(self) -> "V1PodSpec":  # type: ignore[override]
        """The pod's specification, created on first use because importing Kubernetes' client takes a second."""
        return make_restricted_pod_spec(self.primary_container_name)


def make_environment(
    name: str,
    size: Size,
    variables: dict[str, str],
    environment_class: type[TaskEnvironment] = TaskEnvironment,
    **options: Any,
) -> TaskEnvironment:
    """Return an environment whose pods have a size, and the variables of every pod in addition to ``variables``.

    ``options`` are options of ``environment_class``, and replace the defaults.
    """
    return environment_class(
        name=f"ddp-{name}",
        **{
            "image": IMAGE,
            "resources": make_resources(size),
            "env_vars": {
                "FLYTE_DISABLE_SENTRY": os.environ.get("FLYTE_DISABLE_SENTRY", "true"),
                **environment.make_pod_environment(),
                **({FROM_SCRATCH_VARIABLE: "yes"} if os.environ.get(FROM_SCRATCH_VARIABLE) else {}),
                **variables,
            },
            "pod_template": read_text_variable("FLYTE_DDP_POD_TEMPLATE") or RestrictedPod(),
            **options,
        },
    )


def make_resources(size: Size, requests: Size | None = None, shared_memory: str | None = None) -> Resources:
    """Return a size as Flyte 2's resources, with GPUs of the profile's type.

    If ``requests`` is None, the requests equal the limits, so Kubernetes does not evict the pod for memory.
    """
    least, gpu_type = requests or size, read_profile().gpu_type
    gpus = Device(size.gpus, "GPU", gpu_type) if size.gpus and gpu_type else size.gpus or None
    return Resources(
        cpu=(least.cpu, size.cpu),
        memory=(least.memory, size.memory),
        gpu=gpus,
        disk=size.ephemeral_storage,
        shm=shared_memory,
    )


def make_light_environment(name: str, disk: str = "") -> TaskEnvironment:
    """Return the environment of small pods, whose tasks check inputs, use the registry, or await other tasks.

    If ``disk`` is empty, the disk has the size of the profile's ``light`` pods.
    """
    light = read_profile().light
    limits = Size(cpu=light.cpu, memory=light.memory, ephemeral_storage=disk or light.ephemeral_storage)
    requests = Size(cpu="500m", memory="1Gi", ephemeral_storage=limits.ephemeral_storage)
    # A pod that awaits tasks describes the pods of these tasks, so the pod needs all settings.
    variables = environment.read_settings_for_pods()
    return make_environment(name, limits, variables, resources=make_resources(limits, requests))


def make_training_environment(
    name: str, profile: Profile, environment_class: type[TaskEnvironment] = TaskEnvironment, **options: Any
) -> TaskEnvironment:
    """Return the environment of training pods, with all GPUs of the profile, and with wandb's secret unless "off".

    ``options`` are options of ``environment_class``, and replace the defaults.
    """
    secret = environment.read_wandb_secret_id()
    return make_environment(
        name,
        profile,
        environment.make_training_environment(),
        environment_class,
        resources=make_resources(profile, shared_memory=profile.shared_memory),
        secrets=[Secret(secret[1], group=secret[0], as_env_var="WANDB_API_KEY")] if secret else None,
        interruptible=bool(profile.interruptible),
        **name_pod_template(profile),
        **options,
    )


def make_prediction_environment(profile: Profile) -> TaskEnvironment:
    """Return the environment of tasks that apply a model, with one GPU and its share of the profile, or no GPU."""
    variables = environment.make_cache_limit_variable() | environment.read_settings_for_pods(REGISTRY_PODS)
    variables[REQUESTED_GPUS] = str(min(1, profile.gpus))
    share = divide_size(profile, max(1, profile.gpus))
    return make_environment("prediction", share, variables, **name_pod_template(profile))


def name_pod_template(profile: Profile) -> dict[str, Any]:
    return {"pod_template": profile.pod_template} if profile.pod_template else {}


if not is_in_pod() and not is_local_command() and not {"run", "deploy"}.isdisjoint(sys.argv):
    environment.check_settings_for_pods()
PROFILE = read_profile()
CHECKS = make_light_environment("checks")
STORAGE = make_light_environment("storage", disk=PROFILE.data.ephemeral_storage)
DATA = make_environment("data", PROFILE.data, {})
TRAINING = make_training_environment("training", PROFILE)
PREDICTION = make_prediction_environment(PROFILE)
CHECKS.depends_on = [STORAGE, DATA, TRAINING, PREDICTION]  # the tasks of CHECKS call tasks of these
HOURS = timedelta(hours=read_number_variable("FLYTE_DDP_HOURS"))
# Attempts without progress end earlier: CheckpointStore.refuse_futile_attempt.
TRAINING_RETRIES = read_whole_number_variable("FLYTE_DDP_RETRIES")


def training_options() -> dict[str, Any]:
    """Return the options of the tasks that train."""
    cache = cache_by_content(ignored_inputs=("data",))  # run_version identifies the data
    return {"cache": cache, "retries": TRAINING_RETRIES, "timeout": HOURS, "report": True}


def cache_by_content(ignored_inputs: tuple[str, ...] = (), code: str = "") -> Cache:
    """Return the setting by which Flyte 2 caches results by inputs and source code.

    Of equal executions at the same time, only one runs. With FLYTE_DDP_FROM_SCRATCH, nothing is cached.

    Args:
        ignored_inputs: Inputs that do not change the result.
        code: Digest of the source code ("": of the library).
    """
    if os.environ.get(FROM_SCRATCH_VARIABLE):
        return Cache("disable")
    # Not the behavior "override", which never reads the cache of local runs.
    return Cache("auto", version_override=code or library_digest(), ignored_inputs=ignored_inputs, serialize=True)
