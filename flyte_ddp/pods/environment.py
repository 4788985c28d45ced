"""What pods are told at registration, in variables of their environment.

``python -m flyte_ddp.pods.environment`` prints the settings that a registration takes over, for deploy/register.sh.
"""

import hashlib
import os
import sys

from flyte_ddp.code_digest import package_digest
from flyte_ddp.credentials import refuse_credentials
from flyte_ddp.errors import UserError, unknown_name
from flyte_ddp.pods.profiles import NODES_VARIABLE, PROFILE_VARIABLE, chosen_profile, parse_bytes
from flyte_ddp.settings import ALL_PODS, HERE, INTERNAL, REQUESTED_GPUS, TRAINING_PODS, VARIABLES, read_text

CODE_VARIABLE = "FLYTE_DDP_CODE"
CACHE_VARIABLE = "FLYTE_DDP_CACHE_BYTES"
SECRET_VARIABLE = "FLYTE_DDP_WANDB_SECRET"  # noqa: S105 (a name)
DEFAULT_SECRET = "wandb/api_key"  # noqa: S105 (a name)
FROM_SCRATCH_VARIABLE = "FLYTE_DDP_FROM_SCRATCH"
RESULTS_VARIABLE = "FLYTE_DDP_RESULTS"
REGISTRY_VARIABLE = "FLYTE_DDP_REGISTRY"
REPORT_SECONDS = 5  # of a pod's time to stop, to report to the platform


def pod_environment() -> dict[str, str]:
    """Return the variables that every pod is given at registration."""
    return {
        CODE_VARIABLE: package_digest(),
        PROFILE_VARIABLE: read_text(PROFILE_VARIABLE),
        REQUESTED_GPUS: str(chosen_profile().gpus),
        NODES_VARIABLE: read_text(NODES_VARIABLE),
        **settings_for(ALL_PODS),
    }


def training_environment() -> dict[str, str]:
    """Return the variables that a training pod is given: those of every pod, its settings, and where wandb's key is.

    Half of the profile's grace period is for writing the last checkpoint, the other half for ending the ranks and
    uploading the checkpoint. The cache of shards gets half of the disk. What is set at registration counts instead.
    """
    grace = chosen_profile().grace_seconds
    return {
        **pod_environment(),
        **cache_limit(),
        "FLYTE_DDP_SAVE_SECONDS": str(grace // 2),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(grace - REPORT_SECONDS),
        SECRET_VARIABLE: "/".join(wandb_secret() or ("off",)),
        **settings_for(TRAINING_PODS),
    }


def cache_limit() -> dict[str, str]:
    """Return the variable with the size of a pod's cache of shards: as set at registration, or half of the disk."""
    disk = parse_bytes(chosen_profile().ephemeral_storage)
    return {CACHE_VARIABLE: os.environ.get(CACHE_VARIABLE) or str(disk // 2)}


def wandb_environment() -> dict[str, str]:
    """Return the variables that concern wandb, of those that a training pod is given."""
    return {name: value for name, value in training_environment().items() if "WANDB" in name}


def registry_environment() -> dict[str, str]:
    """Return the variable with the address of the registry of models, as set at registration; it may be empty."""
    return {REGISTRY_VARIABLE: read_text(REGISTRY_VARIABLE)}


def settings_for(where: str) -> dict[str, str]:
    """Return the settings that are set here, of those that pods of a kind are given, by their names."""
    return {name: value for name, value in registered_settings().items() if VARIABLES[name].where == where}


def registered_settings() -> dict[str, str]:
    """Return the settings that are set here and that a registration takes over, by their names in order.

    Raises:
        UserError: a setting has a user name or a password in an address, which anybody who sees the pod could read.
    """
    left_here = settings_left_here()
    settings = {name: os.environ[name] for name in sorted(VARIABLES) if os.environ.get(name) and name not in left_here}
    for name, value in settings.items():
        refuse_credentials(name, value)
    return settings


def settings_left_here() -> list[str]:
    """Return the names of settings that are set here and that no pod is given: secrets, and folders of this machine."""
    local = [name for name, variable in VARIABLES.items() if variable.where == HERE]
    if "://" not in os.environ.get(RESULTS_VARIABLE, ""):
        local.append(RESULTS_VARIABLE)
    return [name for name in local if os.environ.get(name)]


def check_registration() -> None:
    """Check the variables that are set here before tasks are registered, and print to stderr which of them stay here.

    Raises:
        UserError: there is no such variable.
    """
    for name in sorted(os.environ):
        if name.startswith("FLYTE_DDP_") and name not in VARIABLES and name not in INTERNAL:
            known = [variable for variable in VARIABLES if variable.startswith("FLYTE_DDP_")]
            raise unknown_name("variable", name, known, page="docs/configuration.md")
    for name in settings_left_here():
        print(f"{name} is not sent to pods: see docs/configuration.md", file=sys.stderr, flush=True)


def settings_digest() -> dict[str, str]:
    """Return a variable that differs between settings: flytekit makes a registration's version of such variables."""
    ours = registered_settings() | pod_environment()
    text = "\n".join(f"{name}={value}" for name, value in sorted(ours.items()))
    return {"FLYTE_DDP_SETTINGS": hashlib.sha256(text.encode()).hexdigest()[:12]}


def wandb_secret() -> tuple[str, str] | None:
    """Return group and key of the platform's secret with wandb's key, or None where FLYTE_DDP_WANDB_SECRET is ``off``.

    Pods without GPUs ask for none unless the variable names one: they are mostly for trying things out.

    Raises:
        UserError: the variable has another form than group/key.
    """
    name = read_text(SECRET_VARIABLE) or (DEFAULT_SECRET if chosen_profile().gpus else "off")
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


if __name__ == "__main__":
    try:
        check_registration()
        for setting, text in registered_settings().items():
            if setting != PROFILE_VARIABLE:  # for which the script has an option
                print(f"{setting}={text}")
    except UserError as error:
        sys.exit(f"Error: {error.message}")
