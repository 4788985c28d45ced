"""What pods are told at registration, in variables of their environment."""

import hashlib
import os

from flyte_ddp.code_digest import package_digest
from flyte_ddp.credentials import refuse_credentials
from flyte_ddp.errors import UserError
from flyte_ddp.pods.profiles import NODES_VARIABLE, PROFILE_VARIABLE, chosen_profile, parse_bytes
from flyte_ddp.settings import ALLOWED, REQUESTED_GPUS

CODE_VARIABLE = "FLYTE_DDP_CODE"
CACHE_VARIABLE = "FLYTE_DDP_CACHE_BYTES"
SAVE_VARIABLE = "FLYTE_DDP_SAVE_SECONDS"
ELASTIC_STOP_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # torch's own: seconds from SIGTERM to SIGKILL of its workers
SECRET_VARIABLE = "FLYTE_DDP_WANDB_SECRET"  # noqa: S105 (a name)
DEFAULT_SECRET = "wandb/api_key"  # noqa: S105 (a name)
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
REPORT_SECONDS = 5  # of a pod's time to stop, to report to the platform


def pod_environment() -> dict[str, str]:
    """Return the variables that every pod is given at registration.

    Raises:
        UserError: a setting has a password in an address.
    """
    name, profile = chosen_profile()
    return {
        CODE_VARIABLE: package_digest(),
        PROFILE_VARIABLE: name,
        REQUESTED_GPUS: str(profile.gpus),
        NODES_VARIABLE: os.environ.get(NODES_VARIABLE) or "1",
        **carried_settings(CARRIED_BY_ALL),
    }


def training_environment() -> dict[str, str]:
    """Return the variables that a training pod is given: those of every pod, its settings, and where wandb's key is.

    Half of the profile's grace period is for writing the last checkpoint, the other half for ending the ranks and
    uploading the checkpoint. The cache of shards gets half of the disk. What is set at registration counts instead.

    Raises:
        UserError: a setting has a password in an address.
    """
    _, profile = chosen_profile()
    seconds = {SAVE_VARIABLE: profile.grace_seconds // 2, ELASTIC_STOP_VARIABLE: profile.grace_seconds - REPORT_SECONDS}
    return {
        **pod_environment(),
        **cache_limit(),
        **{name: os.environ.get(name) or str(value) for name, value in seconds.items()},
        SECRET_VARIABLE: "/".join(wandb_secret() or ("off",)),
        **carried_settings(CARRIED),
    }


def cache_limit() -> dict[str, str]:
    """Return the variable with the size of a pod's cache of shards: as set at registration, or half of the disk."""
    _, profile = chosen_profile()
    return {CACHE_VARIABLE: os.environ.get(CACHE_VARIABLE) or str(parse_bytes(profile.ephemeral_storage) // 2)}


def wandb_environment() -> dict[str, str]:
    """Return the variables that concern wandb, of those that a training pod is given."""
    return {name: value for name, value in training_environment().items() if "WANDB" in name}


def registry_environment() -> dict[str, str]:
    """Return the variable with the address of the registry of models, as set at registration; it may be empty."""
    return {REGISTRY_VARIABLE: os.environ.get(REGISTRY_VARIABLE, "")}


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
    """Return a variable that differs between settings: flytekit makes a registration's version of such variables."""
    names = (NOTIFY_VARIABLE, REGISTRY_VARIABLE, TEMPLATE_VARIABLE)
    ours = {name: os.environ.get(name, "") for name in names} | training_environment()
    text = "\n".join(f"{name}={value}" for name, value in sorted(ours.items()))
    return {SETTINGS_VARIABLE: hashlib.sha256(text.encode()).hexdigest()[:12]}


def wandb_secret() -> tuple[str, str] | None:
    """Return group and key of the platform's secret with wandb's key, or None where FLYTE_DDP_WANDB_SECRET is ``off``.

    Pods without GPUs ask for none unless the variable names one: they are mostly for trying things out.

    Raises:
        UserError: the variable has another form than group/key.
    """
    _, profile = chosen_profile()
    name = os.environ.get(SECRET_VARIABLE) or (DEFAULT_SECRET if profile.gpus else "off")
    if name == "off":
        return None
    group, _, key = name.partition("/")
    if not (group and key):
        raise UserError(f"{SECRET_VARIABLE}={name!r}: must be a secret's group/key, such as {DEFAULT_SECRET}, or off")
    return group, key


def check_pod_code() -> None:
    """In a pod, compare the library with the one that was registered: the cache would file results under other code.

    Raises:
        UserError: they differ, as in an image with a stale copy of the library.
    """
    registered = os.environ.get(CODE_VARIABLE)
    if registered is not None and registered != (here := package_digest()):
        raise UserError(
            f"this pod runs library sources {here} but {registered} were registered: the image holds another copy; "
            "register with deploy/register.sh, which sends all sources along, or rebuild the image"
        )
