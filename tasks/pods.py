"""What tasks get from the cluster: resources, GPUs, image, secrets, environment and cache policy, all in this one file.

The profile is chosen at registration (``FLYTE_DDP_PROFILE``) and carried into the pod by the task's environment, so
that what was requested and what training expects come from the same line of the table.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Optional

from flytekit import Cache, Resources, Secret
from flytekit.core.cache import VersionParameters
from flytekit.extras.accelerators import BaseAccelerator, GPUAccelerator

from flyte_ddp.code_digest import library_digest
from flyte_ddp.errors import UserError, unknown_name
from flyte_ddp.identity import REQUESTED_GPUS

PROFILE_VARIABLE = "FLYTE_DDP_PROFILE"
CODE_VARIABLE = "FLYTE_DDP_CODE"
CACHE_VARIABLE = "FLYTE_DDP_CACHE_BYTES"
SECRET_VARIABLE = "FLYTE_DDP_WANDB_SECRET"  # noqa: S105 (a name)
DEFAULT_SECRET = "wandb/api_key"  # noqa: S105 (a name)
NODES_VARIABLE = "FLYTE_DDP_NODES"
LAUNCHING = Resources(cpu="2", mem="8Gi", ephemeral_storage="20Gi")
ENGINE_RETRIES = 2  # an engine's own, on the hosts that it has; Flyte's would set up another cluster


@dataclass(frozen=True)
class Profile:
    """Resources of the training pod; requests and limits are the same, so that pods are not evicted for memory."""

    gpus: int
    cpu: str
    memory: str
    ephemeral_storage: str
    shared_memory: str  # size of /dev/shm, over which NCCL talks between GPUs that have no direct link
    gpu_type: Optional[str] = None  # Flyte's name of an accelerator, such as nvidia-l4; None takes any
    pod_template: Optional[str] = None  # in the cluster (deploy/pod-template.yaml): tolerations, grace period


PROFILES: dict[str, Profile] = {
    # For clusters without GPUs; on one's own machine resources are not looked at.
    "local": Profile(gpus=0, cpu="2", memory="4Gi", ephemeral_storage="5Gi", shared_memory="256Mi"),
    # The demo cluster of `flytectl demo start` on a laptop.
    "sandbox": Profile(gpus=0, cpu="1", memory="2Gi", ephemeral_storage="2Gi", shared_memory="128Mi"),
    "gpu": Profile(
        gpus=2, cpu="8", memory="30Gi", ephemeral_storage="20Gi", shared_memory="4Gi", pod_template="flyte-ddp-gpu"
    ),
    "gpu-a100": Profile(
        gpus=8,
        cpu="64",
        memory="480Gi",
        ephemeral_storage="200Gi",
        shared_memory="32Gi",
        gpu_type="nvidia-tesla-a100",
        pod_template="flyte-ddp-gpu",
    ),
}
DEFAULT_PROFILE = "gpu"


def chosen_profile() -> str:
    """The profile's name; GPUs unless something else was asked for: a sandbox is never registered by mistake."""
    name = os.environ.get(PROFILE_VARIABLE) or DEFAULT_PROFILE
    if name not in PROFILES:
        raise unknown_name(PROFILE_VARIABLE, name, PROFILES)
    return name


class LibrarySources:
    """Cache policy: the digest of the library's sources, so that changed code is never served old results."""

    def get_version(self, salt: str, params: VersionParameters[Any, Any]) -> str:  # noqa: ARG002 (flytekit's interface)
        """The digest; salt, function and image play no part."""
        return library_digest()


def pod_environment() -> dict[str, str]:
    """What every pod knows of its registration."""
    name = chosen_profile()
    return {
        CODE_VARIABLE: library_digest(),
        PROFILE_VARIABLE: name,
        REQUESTED_GPUS: str(PROFILES[name].gpus),
        NODES_VARIABLE: os.environ.get(NODES_VARIABLE) or "1",
    }


def light_pod() -> dict[str, Any]:
    """Options of a task that checks or fetches: a small pod without GPUs."""
    return {
        "requests": Resources(cpu="500m", mem="1Gi", ephemeral_storage="4Gi"),
        "limits": Resources(cpu="2", mem="4Gi", ephemeral_storage="4Gi"),
        "environment": pod_environment(),
        "timeout": timedelta(hours=1),
    }


def training_pod() -> dict[str, Any]:
    """Options of the training task, from the chosen profile."""
    profile = PROFILES[chosen_profile()]
    resources = resources_of(profile)
    accelerator: Optional[BaseAccelerator] = GPUAccelerator(profile.gpu_type) if profile.gpu_type else None
    return {
        "requests": resources,
        "limits": resources,
        "shared_memory": profile.shared_memory,
        "accelerator": accelerator,
        "pod_template_name": profile.pod_template,
        **for_training(),
    }


def for_training() -> dict[str, Any]:
    """Options of every training task, wherever its ranks are."""
    profile = PROFILES[chosen_profile()]
    return {
        "environment": {
            **pod_environment(),
            **tracking_environment(),
            CACHE_VARIABLE: os.environ.get(CACHE_VARIABLE) or str(in_bytes(profile.ephemeral_storage) // 2),
        },
        "secret_requests": [wandb_secret()] if wandb_secret() else [],
        "timeout": timedelta(hours=24),
    }


def launching_pod() -> dict[str, Any]:
    """Options of a training task whose ranks are in other pods: it launches them, keeps the run folder, and reports."""
    return {"requests": LAUNCHING, "limits": LAUNCHING, **for_training()}


def resources_of(profile: Profile, parts: int = 1) -> Resources:
    """Those of the profile, or one of so many equal parts of them."""
    return Resources(
        cpu=str(max(1, int(profile.cpu) // parts)),
        mem=f"{in_bytes(profile.memory) // parts // 2**20}Mi" if parts > 1 else profile.memory,
        gpu=str(profile.gpus // parts) if profile.gpus else None,
        ephemeral_storage=profile.ephemeral_storage,
    )


def nodes() -> tuple[int, int]:
    """How many pods of the profile's size an engine's ranks are spread over, at least and at most.

    Raises:
        UserError: ``FLYTE_DDP_NODES`` is neither a number nor a range such as 2:4.

    """
    text = os.environ.get(NODES_VARIABLE) or "1"
    least, _, most = text.partition(":")
    try:
        found = int(least), int(most or least)
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1]:
        raise UserError(f"{NODES_VARIABLE}={text!r}: must be a number of nodes, such as 2, or a range, such as 2:4")
    return found


def in_bytes(quantity: str) -> int:
    """A Kubernetes quantity such as 20Gi as a number."""
    return int(quantity[:-2]) * 1024 ** (" KMGT".index(quantity[-2]))


def wandb_secret() -> Optional[Secret]:
    """The secret with wandb's key: ``group/key`` in ``FLYTE_DDP_WANDB_SECRET``, or none where that is ``off``.

    Pods without GPUs ask for none unless told to, because a pod that asks for a secret that is not there never starts.
    """
    default = DEFAULT_SECRET if PROFILES[chosen_profile()].gpus else "off"
    group, _, key = (os.environ.get(SECRET_VARIABLE) or default).partition("/")
    if not key:
        return None
    return Secret(group=group, key=key, mount_requirement=Secret.MountType.ENV_VAR)


def tracking_environment() -> dict[str, str]:
    """Where the training pod logs and copies results to, as set at registration, and where it finds wandb's key."""
    names = ("WANDB_PROJECT", "WANDB_ENTITY", "WANDB_MODE", "WANDB_BASE_URL", "FLYTE_DDP_WANDB_TABLE_ROWS")
    chosen = {name: os.environ[name] for name in names if os.environ.get(name)}
    results = os.environ.get("FLYTE_DDP_RESULTS", "")
    if "://" in results:  # a folder of this machine's would go with the pod
        chosen["FLYTE_DDP_RESULTS"] = results
    secret = wandb_secret()
    return {**chosen, SECRET_VARIABLE: f"{secret.group}/{secret.key}" if secret else "off"}


def by_content(ignored_inputs: tuple[str, ...] = ()) -> Cache:
    """Caching by inputs and sources; identical executions at the same time run once."""
    return Cache(policies=[LibrarySources()], ignored_inputs=ignored_inputs, serialize=True)


def check_code() -> None:
    """In a pod: the library must be the one that was registered, or the cache would file results under other code.

    Raises:
        UserError: an image with a stale copy of the library.

    """
    registered, here = os.environ.get(CODE_VARIABLE), library_digest()
    if registered is not None and registered != here:
        raise UserError(
            f"this pod runs library sources {here} but {registered} were registered: the image holds another copy; "
            "register with deploy/register.sh, which sends all sources along, or rebuild the image"
        )
