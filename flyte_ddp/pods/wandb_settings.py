"""How a task logs to wandb: settings from the environment, and in pods the key from a secret."""

import os
import posixpath
from dataclasses import replace
from pathlib import Path

from flyte_ddp import storage
from flyte_ddp.files import list_files
from flyte_ddp.pods.environment import wandb_secret_id
from flyte_ddp.pods.platforms import Platform, execution_names, is_in_pod, storage_address
from flyte_ddp.runs.run_folder import UNFINISHED
from flyte_ddp.settings import Settings, read_settings


def read_run_settings(platform: Platform, run: str) -> Settings:
    """Return the settings of a run, with the same wandb run id for all attempts.

    The id is the run's name, or EXECUTION-RUN in a pod. In a pod without WANDB_API_KEY, sets this variable from the
    platform's secret, or prints that the secret is missing.
    """
    if not is_in_pod():
        return replace(read_settings(), wandb_run_id=run)
    secret = wandb_secret_id()
    if secret is not None and not os.environ.get("WANDB_API_KEY"):
        # Flyte puts a secret that a task requests into a variable of this name.
        variable = os.environ.get("FLYTE_SECRETS_ENV_PREFIX", "_FSEC_") + "_".join(secret).upper()
        if variable in os.environ:
            os.environ["WANDB_API_KEY"] = os.environ[variable].strip()
        else:
            print(f"secret {'/'.join(secret)} is missing in this pod: wandb logs offline", flush=True)
    run_id = f"{execution_names()[2]}-{run}"[-128:]  # wandb accepts 128 characters
    return replace(read_settings(), wandb_run_id=run_id, wandb_kept_at=unsent_address(platform))


def unsent_address(platform: Platform) -> str:
    return posixpath.join(storage_address(platform.output_address()), "wandb")


def upload_unsent_wandb(platform: Platform, run_folder: Path) -> None:
    """Upload the unsent wandb folder of a pod's run to the task's outputs. Prints failures."""
    for folder in (run_folder / UNFINISHED / "wandb", run_folder / "wandb"):
        try:
            name = (folder / "unsent").read_text()  # written by flyte_ddp.tracking.wandb_run.WandbProcess
            for path in list_files(folder / name):
                storage.write_file(posixpath.join(unsent_address(platform), path.relative_to(folder)), path)
        except FileNotFoundError:
            continue
        except Exception as error:
            print(f"wandb's folder {folder} could not be uploaded: {error}", flush=True)
