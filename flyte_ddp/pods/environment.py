"""Environment variables that a registration gives to pods.

``python -m flyte_ddp.pods.environment`` prints the settings that a registration copies to pods, for deploy/register.sh.
"""

import hashlib
import os
import sys

from flyte_ddp.core.errors import UserError, print_to_stderr, unknown_name_error
from flyte_ddp.core.settings import (
    ALL_PODS,
    HERE,
    MODULES,
    REQUESTED_GPUS,
    TRAINING_PODS,
    load_variables_file,
    read_nameable_modules,
    read_text_variable,
    read_variable_table,
)
from flyte_ddp.core.text.credentials import check_no_credentials
from flyte_ddp.core.user_code.digest import package_digest
from flyte_ddp.pods.profiles import NODES_VARIABLE, PROFILE_VARIABLE, parse_quantity, read_profile

CODE_VARIABLE = "FLYTE_DDP_CODE"
CACHE_VARIABLE = "FLYTE_DDP_CACHE_BYTES"
SECRET_VARIABLE = "FLYTE_DDP_WANDB_SECRET"  # noqa: S105 (a name)
DEFAULT_SECRET = "wandb/api_key"  # noqa: S105 (a name)
FROM_SCRATCH_VARIABLE = "FLYTE_DDP_FROM_SCRATCH"
RESULTS_VARIABLE = "FLYTE_DDP_RESULTS"
REGISTRY_VARIABLE = "FLYTE_DDP_REGISTRY"
REPORT_SECONDS = 5  # part of a pod's grace period, for the report to the platform


def make_pod_environment() -> dict[str, str]:
    """Return the environment variables of every pod.

    The variables are the digest of the library's code, the profile, the profile's GPUs, the number of nodes, the
    modules that hyperparameters may name (all), and the settings that a registration copies to all pods. These settings
    override the other variables.

    Raises:
        UserError: FLYTE_DDP_PROFILE is wrong, or a setting contains credentials.
    """
    return {
        CODE_VARIABLE: package_digest(),
        PROFILE_VARIABLE: read_text_variable(PROFILE_VARIABLE),
        REQUESTED_GPUS: str(read_profile().gpus),
        NODES_VARIABLE: read_text_variable(NODES_VARIABLE),
        MODULES: ".",
        **read_settings_for_pods(ALL_PODS),
    }


def make_training_environment() -> dict[str, str]:
    """Return the environment variables that a training pod has in addition to the variables of every pod.

    Settings in this process's environment override computed values.
    """
    grace = read_profile().grace_seconds
    return {
        **make_cache_limit_variable(),
        "FLYTE_DDP_SAVE_SECONDS": str(grace // 2),  # the rest is for ending the ranks, and uploading the checkpoint
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(grace - REPORT_SECONDS),
        SECRET_VARIABLE: "/".join(read_wandb_secret_id() or ("off",)),
        **read_settings_for_pods(TRAINING_PODS),
    }


def make_cache_limit_variable() -> dict[str, str]:
    """Return FLYTE_DDP_CACHE_BYTES, the limit of a pod's cache of shards, by name.

    The value comes from this process's environment, or is half of the pod's disk.
    """
    disk = int(parse_quantity(read_profile().ephemeral_storage))
    return {CACHE_VARIABLE: os.environ.get(CACHE_VARIABLE) or str(disk // 2)}


def read_settings_for_pods(kind: str = "") -> dict[str, str]:
    """Return the variables of this environment that a registration copies to pods of ``kind``, such as ALL_PODS.

    If ``kind`` is "", returns the variables of every kind together.

    Raises:
        UserError: A setting contains credentials.
    """
    left_here, settings = list_unsent_settings(), {}
    for name, variable in sorted(read_variable_table().items()):
        value = os.environ.get(name)
        if value and name not in left_here:
            check_no_credentials(name, value)
            if kind in ("", variable.where):
                settings[name] = value
    return settings


def list_unsent_settings() -> list[str]:
    """Return the names of settings in this environment that a registration does not send to pods.

    Examples are secrets and local folders.
    """
    local = [name for name, variable in read_variable_table().items() if variable.where == HERE]
    if "://" not in os.environ.get(RESULTS_VARIABLE, ""):
        local.append(RESULTS_VARIABLE)
    return [name for name in local if os.environ.get(name)]


def check_settings_for_pods() -> None:
    """Check the settings of a registration, and print to stderr which settings are not sent to pods.

    Raises:
        UserError: A FLYTE_DDP_ variable is not in variables.toml, or FLYTE_DDP_MODULES is invalid.
    """
    known = [name for name in read_variable_table() if name.startswith("FLYTE_DDP_")]
    for name in sorted(os.environ):
        if name.startswith("FLYTE_DDP_") and name not in known and name not in load_variables_file()["internal"]:
            raise unknown_name_error("variable", name, known, page="docs/configuration.md")
    read_nameable_modules()  # raises UserError for modules that cannot be allowed
    for name in list_unsent_settings():
        print_to_stderr(f"{name} is not sent to pods: see docs/configuration.md")


def make_settings_digest_variable() -> dict[str, str]:
    """Return the variable FLYTE_DDP_SETTINGS with a digest of all variables of pods.

    The digest is a part of the registration's version, so other settings make another version.
    """
    variables = read_settings_for_pods() | make_pod_environment()
    text = "\n".join(f"{name}={value}" for name, value in sorted(variables.items()))
    return {"FLYTE_DDP_SETTINGS": hashlib.sha256(text.encode()).hexdigest()[:12]}


def read_wandb_secret_id() -> tuple[str, str] | None:
    """Return group and key of the platform's secret with wandb's key, or None if pods get no secret.

    By default, only profiles with GPUs get the secret ``wandb/api_key``.

    Raises:
        UserError: FLYTE_DDP_WANDB_SECRET is malformed.
    """
    # By default pods without GPUs get no secret, because they mostly run tests.
    name = read_text_variable(SECRET_VARIABLE) or (DEFAULT_SECRET if read_profile().gpus else "off")
    if name == "off":
        return None
    group, _, key = name.partition("/")
    if not (group and key):
        raise UserError(f"{SECRET_VARIABLE}={name!r}: must be a secret's group/key, such as {DEFAULT_SECRET}, or off")
    return group, key


def refuse_unregistered_code() -> None:
    """Raise UserError if this pod's copy of the library differs from the registered copy.

    Otherwise Flyte would cache results of different code.
    """
    registered = os.environ.get(CODE_VARIABLE)
    if registered is not None and registered != (here := package_digest()):
        raise UserError(
            f"this pod runs library sources {here} but {registered} were registered: the image has a different copy; "
            "register with deploy/register.sh, which sends all sources along, or rebuild the image"
        )


if __name__ == "__main__":
    try:
        check_settings_for_pods()
        for setting, text in read_settings_for_pods().items():
            if setting != PROFILE_VARIABLE:  # for which the script has an option
                print(f"{setting}={text}")
    except UserError as error:
        sys.exit(f"Error: {error.message}")
