"""The training task on Dask: a worker for each rank, set up by Flyte for the run; locally, workers of this machine."""

from functools import partial
from pathlib import Path

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekitplugins.dask import Dask, Scheduler, WorkerGroup

from flyte_ddp.config import Hyperparameters
from flyte_ddp.run import Result, run_training
from flyte_ddp.settings import Settings
from tasks import pods, recovery
from tasks.training import TrainingOutputs, outputs, trained


def cluster() -> Dask:
    """A scheduler, and a worker for each rank."""
    profile = pods.PROFILES[pods.chosen_profile()]
    ranks_each = max(1, profile.gpus)
    worker = pods.resources_of(profile, ranks_each)
    return Dask(
        scheduler=Scheduler(requests=pods.LAUNCHING, limits=pods.LAUNCHING),
        workers=WorkerGroup(number_of_workers=pods.nodes()[1] * ranks_each, requests=worker, limits=worker),
    )


@recovery.mistakes_in_inputs
@task(task_config=cluster(), **pods.launching_pod(), cache=pods.by_run(), enable_deck=True, deck_fields=())
def train_on_dask(hp: Hyperparameters, data: FlyteDirectory, run_version: str) -> TrainingOutputs:
    """Train a model with distributed data parallelism on a Dask cluster, one rank to a worker.

    Returns what train_model returns.
    """
    return outputs(trained(hp, data, run_version, on_dask))


def on_dask(hp: Hyperparameters, data: Path, run_folder: Path, settings: Settings) -> Result:
    """Trains on the cluster that Flyte has set up, or locally on one of this machine."""
    from flyte_ddp.launch import dask

    with dask.connected(num_ranks=hp.num_ranks) as client:
        launch = partial(dask.launch, client=client, retries=pods.ENGINE_RETRIES)
        return run_training(hp, data, run_folder, settings, launch=launch, hardware=dask.hardware(hp, client))
