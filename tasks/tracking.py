"""How a training task logs: from the environment, with wandb's key from a Flyte secret on a cluster."""

import os

from flytekit import current_context

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
    return from_environment(wandb_run_id=f"{current_context().execution_id.name}-{run}"[-128:])
