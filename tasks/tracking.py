"""How a training task logs: from the environment, with wandb's key from a Flyte secret on a cluster."""

import os
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from flytekit import FlyteContextManager, current_context

from flyte_ddp.runs.run_folder import UNFINISHED
from flyte_ddp.settings import Settings, from_environment
from tasks import places, pods


def settings(run: str) -> Settings:
    """The run's settings; its wandb id is the same over retries, so that they continue one wandb run.

    Locally the id is the run's name. On a cluster every task of an execution has that execution's name, so the run's
    name is added to it.
    """
    if places.is_local():
        return from_environment(wandb_run_id=run)
    secret = pods.wandb_secret()
    if secret is not None and not os.environ.get("WANDB_API_KEY"):
        try:
            os.environ["WANDB_API_KEY"] = current_context().secrets.get(secret.group, secret.key)
        except ValueError:
            print(f"no secret {secret.group}/{secret.key} in this pod: wandb logs offline", flush=True)
    logging = from_environment(wandb_run_id=f"{current_context().execution_id.name}-{run}"[-128:])
    return replace(logging, wandb_kept_at=kept_at())


def kept_at() -> str:
    """Where a pod uploads what it could not send to wandb's server: beside its outputs."""
    return posixpath.join(FlyteContextManager.current_context().file_access.raw_output_prefix, "wandb")


@contextmanager
def unsent_kept(run_folder: Path) -> Iterator[None]:
    """In a pod: uploads wandb's folder at the end of the run, if wandb could not send it."""
    try:
        yield
    finally:
        if not places.is_local():
            keep_unsent(run_folder / UNFINISHED / "wandb")
            keep_unsent(run_folder / "wandb")


def keep_unsent(folder: Path) -> None:
    """Uploads what :class:`flyte_ddp.tracking.wandb_run.WandbProcess` says is unsent."""
    try:
        name = (folder / "unsent").read_text()
        access = FlyteContextManager.current_context().file_access
        access.put_data(str(folder / name), posixpath.join(kept_at(), name), is_multipart=True)
    except FileNotFoundError:
        return
    except Exception as error:
        print(f"wandb's folder {folder} could not be kept: {error}", flush=True)
