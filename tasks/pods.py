"""What tasks get from the cluster: resources, GPUs, image, secrets, environment and cache policy, all in this one file.

The profile is chosen at registration (``FLYTE_DDP_PROFILE``) and carried into the pod by the task's environment, so
that what was requested and what training expects come from the same line of the table.
"""

import hashlib
import math
import os
import re
from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal
from typing import Any, Optional

from flytekit import Cache, Resources, Secret
from flytekit.extras import accelerators
from flytekit.extras.accelerators import BaseAccelerator

from flyte_ddp.code_digest import library_digest, package_digest
from flyte_ddp.credentials import refuse_credentials
from flyte_ddp.errors import UserError, unknown_name
from flyte_ddp.hardware import MOST_CPU_RANKS
from flyte_ddp.settings import ALLOWED, REQUESTED_GPUS
from tasks.restricted import RestrictedPod

PROFILE_VARIABLE = "FLYTE_DDP_PROFILE"
CODE_VARIABLE = "FLYTE_DDP_CODE"
CACHE_VARIABLE = "FLYTE_DDP_CACHE_BYTES"
SAVE_VARIABLE = "FLYTE_DDP_SAVE_SECONDS"
ELASTIC_STOP_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # torch's own: seconds from SIGTERM to SIGKILL of its workers
SECRET_VARIABLE = "FLYTE_DDP_WANDB_SECRET"  # noqa: S105 (a name)
DEFAULT_SECRET = "wandb/api_key"  # noqa: S105 (a name)
NODES_VARIABLE = "FLYTE_DDP_NODES"
CHECKPOINTS_VARIABLE = "FLYTE_DDP_CHECKPOINTS"  # where in the blob store; empty for beside Flyte's outputs
CHECKPOINT_DAYS_VARIABLE = "FLYTE_DDP_CHECKPOINT_DAYS"
NOTIFY_VARIABLE = "FLYTE_DDP_NOTIFY"
SETTINGS_VARIABLE = "FLYTE_DDP_SETTINGS"
TEMPLATE_VARIABLE = "FLYTE_DDP_POD_TEMPLATE"  # in the cluster, for pods to which the profile gives none
FROM_SCRATCH_VARIABLE = "FLYTE_DDP_FROM_SCRATCH"  # set for an execution that is to train from the first step
RESULTS_VARIABLE = "FLYTE_DDP_RESULTS"
REGISTRY_VARIABLE = "FLYTE_DDP_REGISTRY"  # where champions are
# Settings that pods take over as they are at registration: all pods, and those that train.
CARRIED_BY_ALL = (ALLOWED, "FLYTE_DDP_LOADER_THREADS", "FLYTE_DDP_PROGRESS")
CARRIED = (
    *CARRIED_BY_ALL,
    "FLYTE_DDP_CHECKPOINT_SECONDS",
    "FLYTE_DDP_TIMEOUT",
    "FLYTE_DDP_WANDB_TABLE_ROWS",
    "FLYTE_DDP_WANDB_TIMEOUT",
    "FLYTE_DDP_WANDB_WATCH",
    "WANDB_PROJECT",
    "WANDB_ENTITY",
    "WANDB_MODE",
    "WANDB_BASE_URL",
    RESULTS_VARIABLE,
    CHECKPOINTS_VARIABLE,
    CHECKPOINT_DAYS_VARIABLE,
)
WITH_DECK: dict[str, Any] = {"enable_deck": True, "deck_fields": ()}  # with pages of the task's own only
REPORT_SECONDS = 5  # of a pod's time to stop, to tell Flyte
LOSSES = 100  # of a training pod; those without any progress: see CheckpointStore.stop_if_futile
ENGINE_RETRIES = 2  # an engine's own, on the hosts that it has; Flyte's would set up another cluster
UNITS = {  # of Kubernetes' quantities
    "": Decimal(1),
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("num", -3)},
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", 1)},
    **{f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", 1)},
}


@dataclass(frozen=True)
class Profile:
    """Resources of the training pod."""

    gpus: int
    cpu: str
    memory: str
    ephemeral_storage: str
    shared_memory: str  # size of /dev/shm, over which NCCL talks between GPUs that have no direct link
    data: Resources  # of pods that fetch, pack and check data, whose disk must hold all of it
    light: Resources  # the most that pods get that look at inputs or an index; they ask for half a CPU and 1 GiB
    gpu_type: Optional[BaseAccelerator[Any]] = None  # of flytekit.extras.accelerators, such as L4; None takes any
    pod_template: Optional[str] = None  # in the cluster (deploy/pod-template.yaml): tolerations, grace period
    grace_seconds: int = 30  # from SIGTERM to SIGKILL: the template's terminationGracePeriodSeconds, or Kubernetes' own
    interruptible: Optional[bool] = None  # True: train on nodes that may be taken away; None: as launched


PROFILES: dict[str, Profile] = {
    # For clusters without GPUs; on one's own machine resources are not looked at.
    "local": Profile(
        gpus=0,
        cpu="2",
        memory="4Gi",
        ephemeral_storage="5Gi",
        shared_memory="256Mi",
        data=Resources(cpu="2", mem="4Gi", ephemeral_storage="20Gi"),
        light=Resources(cpu="2", mem="4Gi", ephemeral_storage="4Gi"),
    ),
    # The demo cluster of `flytectl demo start` on a laptop.
    "sandbox": Profile(
        gpus=0,
        cpu="1",
        memory="2Gi",
        ephemeral_storage="2Gi",
        shared_memory="128Mi",
        data=Resources(cpu="1", mem="2Gi", ephemeral_storage="4Gi"),
        light=Resources(cpu="1", mem="2Gi", ephemeral_storage="2Gi"),
    ),
    "gpu": Profile(
        gpus=2,
        cpu="8",
        memory="30Gi",
        ephemeral_storage="20Gi",
        shared_memory="4Gi",
        data=Resources(cpu="2", mem="8Gi", ephemeral_storage="100Gi"),
        light=Resources(cpu="2", mem="4Gi", ephemeral_storage="4Gi"),
        pod_template="flyte-ddp-gpu",
        grace_seconds=120,
    ),
    "gpu-a100": Profile(
        gpus=8,
        cpu="64",
        memory="480Gi",
        ephemeral_storage="200Gi",
        shared_memory="32Gi",
        data=Resources(cpu="4", mem="16Gi", ephemeral_storage="500Gi"),
        light=Resources(cpu="2", mem="4Gi", ephemeral_storage="4Gi"),
        gpu_type=accelerators.A100,
        pod_template="flyte-ddp-gpu",
        grace_seconds=120,
    ),
}
DEFAULT_PROFILE = "gpu"


def chosen_profile() -> str:
    """The profile's name; GPUs unless something else was asked for: a sandbox is never registered by mistake."""
    name = os.environ.get(PROFILE_VARIABLE) or DEFAULT_PROFILE
    if name not in PROFILES:
        raise unknown_name(PROFILE_VARIABLE, name, PROFILES)
    return name


def pod_environment() -> dict[str, str]:
    """What every pod is told of its registration."""
    name = chosen_profile()
    return {
        CODE_VARIABLE: package_digest(),
        PROFILE_VARIABLE: name,
        REQUESTED_GPUS: str(PROFILES[name].gpus),
        NODES_VARIABLE: os.environ.get(NODES_VARIABLE) or "1",
        **carried_settings(CARRIED_BY_ALL),
    }


def carried_settings(names: tuple[str, ...]) -> dict[str, str]:
    """Return those of the settings that are set here, by their names.

    Raises:
        UserError: one has a user name or a password in an address, which anybody who sees the pod could read.
    """
    found = {name: os.environ[name] for name in names if os.environ.get(name)}
    if "://" not in found.get(RESULTS_VARIABLE, ""):  # a folder of this machine's would go with the pod
        found.pop(RESULTS_VARIABLE, None)
    for name, value in found.items():
        refuse_credentials(name, value)
    return found


def settings_digest() -> dict[str, str]:
    """A variable that differs between settings: flytekit makes a registration's version of such variables."""
    names = (NOTIFY_VARIABLE, REGISTRY_VARIABLE, TEMPLATE_VARIABLE)
    ours = {name: os.environ.get(name, "") for name in names} | training_environment()
    text = "\n".join(f"{name}={value}" for name, value in sorted(ours.items()))
    return {SETTINGS_VARIABLE: hashlib.sha256(text.encode()).hexdigest()[:12]}


def pod_templates(of_profile: Optional[str] = None) -> dict[str, Any]:
    """Return the options by which every task names its pod templates: its own, and one that is in the cluster.

    Args:
        of_profile: name of the cluster's template that the profile gives to this pod; None for the one named by
            FLYTE_DDP_POD_TEMPLATE at registration, if any.
    """
    named = of_profile or os.environ.get(TEMPLATE_VARIABLE) or None
    return {"pod_template": RestrictedPod(), "pod_template_name": named}


def light_pod() -> dict[str, Any]:
    """Options of a task that looks at inputs or an index: a small pod without GPUs."""
    limits = PROFILES[chosen_profile()].light
    return {
        **pod_templates(),
        "requests": Resources(cpu="500m", mem="1Gi", ephemeral_storage=limits.ephemeral_storage),
        "limits": limits,
        "environment": pod_environment(),
        "timeout": timedelta(hours=1),
        "retries": 2,
    }


def storing_pod() -> dict[str, Any]:
    """Options of a task that puts a version into the registry: a small pod with a large disk, without GPUs."""
    options, disk = light_pod(), PROFILES[chosen_profile()].data.ephemeral_storage
    sizes = {name: replace(options[name], ephemeral_storage=disk) for name in ("requests", "limits")}
    return with_registry({**options, **sizes})


def data_pod() -> dict[str, Any]:
    """Options of a task through which all data go: it fetches, packs, indexes or checks them, without GPUs."""
    return {
        **exactly(PROFILES[chosen_profile()].data),
        **pod_templates(),
        "environment": pod_environment(),
        "timeout": timedelta(hours=24),
        "retries": 2,
    }


def prediction_pod() -> dict[str, Any]:
    """Options of the prediction task: one of the profile's GPUs with its share of the rest, or all of it without."""
    profile = PROFILES[chosen_profile()]
    return {
        **exactly(resources_of(profile, parts=max(1, profile.gpus))),
        **pod_templates(profile.pod_template),
        "accelerator": profile.gpu_type,
        "environment": {**pod_environment(), **cache_limit(), REQUESTED_GPUS: str(min(1, profile.gpus))},
        "timeout": timedelta(hours=24),
        "retries": 2,
        **WITH_DECK,
    }


def with_registry(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a task that reads or writes the registry of models."""
    address = os.environ.get(REGISTRY_VARIABLE, "")
    return {**options, "environment": {**options["environment"], REGISTRY_VARIABLE: address}}


def promoting_pod() -> dict[str, Any]:
    """Options of a task that makes a version the champion, in the registry and, where there is a key, for wandb."""
    options, secret = storing_pod(), wandb_secret()
    environment = {name: value for name, value in training_environment().items() if "WANDB" in name}
    environment = {**options["environment"], **environment}
    return {**options, "environment": environment, "secret_requests": [secret] if secret else []}


def training_pod() -> dict[str, Any]:
    """Options of a training task whose ranks are in its own pod."""
    profile = PROFILES[chosen_profile()]
    resources = resources_of(profile)
    return {**launching_pod(resources), "accelerator": profile.gpu_type, "shared_memory": profile.shared_memory}


def launching_pod(resources: Resources) -> dict[str, Any]:
    """Options of a training task whose ranks are in other pods: it launches them, keeps the run folder, and reports."""
    profile, secret = PROFILES[chosen_profile()], wandb_secret()
    return {
        **exactly(resources),
        **pod_templates(profile.pod_template),
        "environment": training_environment(),
        "secret_requests": [secret] if secret else [],
        "interruptible": profile.interruptible,
        "timeout": timedelta(hours=24),
        "retries": LOSSES,
        "cache": by_content(ignored_inputs=("data",)),  # whose address always differs; run_version has their version
        **WITH_DECK,
    }


def exactly(resources: Resources) -> dict[str, Resources]:
    """Requests and limits that are the same, so that pods are not evicted for memory."""
    return {"requests": resources, "limits": resources}


def training_environment() -> dict[str, str]:
    """Return what a training pod is told besides: its settings, its cache's size, its times, and where wandb's key is.

    Raises:
        UserError: a setting has a password in it.
    """
    secret = wandb_secret()
    named = f"{secret.group}/{secret.key}" if secret else "off"
    ours = {**pod_environment(), **cache_limit(), **time_to_stop(), SECRET_VARIABLE: named}
    return {**ours, **carried_settings(CARRIED)}


def time_to_stop() -> dict[str, str]:
    """Return how the profile's grace period is shared out: half of it for writing the last checkpoint.

    The other half is for ending the ranks and uploading the checkpoint. What is set at registration counts.
    """
    grace = PROFILES[chosen_profile()].grace_seconds
    seconds = {SAVE_VARIABLE: grace // 2, ELASTIC_STOP_VARIABLE: grace - REPORT_SECONDS}
    return {name: os.environ.get(name) or str(value) for name, value in seconds.items()}


def cache_limit() -> dict[str, str]:
    """The size of the cache of shards in a pod of the profile: as set at registration, or half of its disk."""
    storage = in_bytes(PROFILES[chosen_profile()].ephemeral_storage)
    return {CACHE_VARIABLE: os.environ.get(CACHE_VARIABLE) or str(storage // 2)}


def resources_of(profile: Profile, parts: int = 1) -> Resources:
    """The profile's resources, or one of several equal parts of them."""
    thousandths = max(1, int(quantity(profile.cpu) / parts * 1000))
    return Resources(
        cpu=f"{thousandths}m" if thousandths % 1000 else f"{thousandths // 1000}",
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


def ranks_of_elastic() -> int:
    """How many Elastic starts on each node: one for each GPU; without GPUs, a few."""
    profile = PROFILES[chosen_profile()]
    return profile.gpus or max(1, min(int(quantity(profile.cpu)), MOST_CPU_RANKS))


def nodes_and_ranks(engine: str) -> tuple[int, int, int]:
    """What a training task asks for: nodes at most, ranks where ``num_ranks`` does not decide, and a limit on ranks.

    Args:
        engine: elastic, ray or dask; empty for training in one pod.

    Returns:
        Of the ranks 0 where ``num_ranks`` decides; of their limit without GPUs 0 where there is none.

    Raises:
        UserError: another engine.
    """
    if not engine:
        return 1, 0, 0
    most, profile = nodes()[1], PROFILES[chosen_profile()]
    capacities = {"elastic": 0, "ray": math.ceil(quantity(profile.cpu)), "dask": max(1, profile.gpus)}
    if engine not in capacities:
        raise unknown_name("engine", engine, capacities)
    return most, most * ranks_of_elastic() if engine == "elastic" else 0, most * capacities[engine]


def quantity(text: str) -> Decimal:
    """A Kubernetes quantity, such as 20Gi, 3500m or 1.5e9, as a number.

    Raises:
        UserError: it is none, or not positive.
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)(?:([eE][+-]?\d+)|([KMGTPE]i|[numkMGTPE])?)", text)
    if found is None or not Decimal(found[1]):
        raise UserError(f"quantity {text!r} (tasks/pods.py): must be one of Kubernetes', such as 8, 3500m, 20Gi or 20G")
    number, exponent, suffix = found.groups()
    return Decimal(f"{number}{exponent or ''}") * UNITS[suffix or ""]


def in_bytes(text: str) -> int:
    """A quantity of memory or disk."""
    return int(quantity(text))


def wandb_secret() -> Optional[Secret]:
    """The secret with wandb's key: ``group/key`` in ``FLYTE_DDP_WANDB_SECRET``, or none where that is ``off``.

    Pods without GPUs ask for none unless told to: they are mostly for trying things out.

    Raises:
        UserError: it is neither.
    """
    default = DEFAULT_SECRET if PROFILES[chosen_profile()].gpus else "off"
    name = os.environ.get(SECRET_VARIABLE) or default
    if name == "off":
        return None
    group, _, key = name.partition("/")
    if not (group and key):
        raise UserError(f"{SECRET_VARIABLE}={name!r}: must be a secret's group/key, such as {DEFAULT_SECRET}, or off")
    return Secret(group=group, key=key, mount_requirement=Secret.MountType.ENV_VAR)


def by_content(ignored_inputs: tuple[str, ...] = (), code: str = "") -> Cache:
    """Caching by inputs and the sources that training may import, or others; equal executions at a time run once."""
    return Cache(version=code or library_digest(), ignored_inputs=ignored_inputs, serialize=True)


def check_code() -> None:
    """In a pod: the library must be the one that was registered, or the cache would file results under other code.

    Raises:
        UserError: an image with a stale copy of the library.
    """
    registered = os.environ.get(CODE_VARIABLE)
    if registered is not None and registered != (here := package_digest()):
        raise UserError(
            f"this pod runs library sources {here} but {registered} were registered: the image holds another copy; "
            "register with deploy/register.sh, which sends all sources along, or rebuild the image"
        )
