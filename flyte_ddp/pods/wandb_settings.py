"""How a task logs to wandb: from the environment, in pods with the key from a secret of the platform."""

import os
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from flyte_ddp.pods.environment import wandb_secret
from flyte_ddp.pods.platforms import Platform, execution_names
from flyte_ddp.runs.run_folder import UNFINISHED
from flyte_ddp.settings import Settings, from_environment


def read_settings(platform: Platform, run: str) -> Settings:
    """Return the run's settings from the environment; in a pod put wandb's key into the environment, from its secret.

    The run's id for wandb is the same in each attempt, so that they continue one wandb run: locally the run's name, in
    a pod the execution's with that of the run, of which an execution may have several.
    """
    if platform.is_local():
        return from_environment(wandb_run_id=run)
    secret = wandb_secret()
    if secret is not None and not os.environ.get("WANDB_API_KEY"):
        key = platform.read_secret(*secret)
        if key is None:
            print(f"no secret {'/'.join(secret)} in this pod: wandb logs offline", flush=True)
        else:
            os.environ["WANDB_API_KEY"] = key
    settings = from_environment(wandb_run_id=f"{execution_names()[2]}-{run}"[-128:])
    return replace(settings, wandb_kept_at=unsent_address(platform))


def unsent_address(platform: Platform) -> str:
    """Return where a pod uploads what it could not send to wandb's server: beside its outputs."""
    return posixpath.join(platform.output_address(), "wandb")


@contextmanager
def keep_unsent(platform: Platform, run_folder: Path) -> Iterator[None]:
    """In a pod, upload wandb's folder at the end of the block, if wandb could not send it; print why that fails."""
    try:
        yield
    finally:
        for folder in () if platform.is_local() else (run_folder / UNFINISHED / "wandb", run_folder / "wandb"):
            try:
                name = (folder / "unsent").read_text()  # see flyte_ddp.tracking.wandb_run.WandbProcess
                platform.upload_folder(folder / name, posixpath.join(unsent_address(platform), name))
            except FileNotFoundError:
                continue
            except Exception as error:
                print(f"wandb's folder {folder} could not be kept: {error}", flush=True)
