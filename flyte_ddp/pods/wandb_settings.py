"""How a task logs to wandb: settings from the environment, and in pods the key from a secret."""

import os
import posixpath
from dataclasses import replace

from flyte_ddp.core.settings import Settings, read_settings
from flyte_ddp.pods.environment import read_wandb_secret_id
from flyte_ddp.pods.platforms import Platform, convert_to_storage_address, is_in_pod, read_execution_names


def read_run_settings(platform: Platform, run: str) -> Settings:
    """Return the settings of a run from the environment, with a wandb run id that all attempts share.

    The id is the run's name, or EXECUTION-RUN in a pod. In a pod without WANDB_API_KEY, sets this environment variable
    from the platform's secret, or prints that the secret is missing.
    """
    if not is_in_pod():
        return replace(read_settings(), wandb_run_id=run)
    secret = read_wandb_secret_id()
    if secret is not None and not os.environ.get("WANDB_API_KEY"):
        # Flyte puts a secret that a task requests into a variable of this name.
        variable = os.environ.get("FLYTE_SECRETS_ENV_PREFIX", "_FSEC_") + "_".join(secret).upper()
        if variable in os.environ:
            os.environ["WANDB_API_KEY"] = os.environ[variable].strip()
        else:
            print(f"secret {'/'.join(secret)} is missing in this pod: wandb logs offline", flush=True)
    run_id = f"{read_execution_names()[2]}-{run}"[-128:]  # wandb accepts 128 characters
    kept_at = posixpath.join(convert_to_storage_address(platform.output_address()), "wandb")
    return replace(read_settings(), wandb_run_id=run_id, wandb_kept_at=kept_at)
