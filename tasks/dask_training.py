"""The training task on Dask: a worker for each rank, set up by Flyte for the run; locally, workers of this machine."""

from functools import partial
from pathlib import Path

from flytekit import Resources, task
from flytekit.types.directory import FlyteDirectory
from flytekitplugins.dask import Dask, Scheduler, WorkerGroup

from flyte_ddp.config import Hyperparameters
from flyte_ddp.run import Result, run_training
from flyte_ddp.settings import Settings
from tasks import places, pods, recovery
from tasks.training import TrainingOutputs, outputs, trained

PROFILE = pods.PROFILES[pods.chosen_profile()]
RANKS_EACH = max(1, PROFILE.gpus)  # node
WORKERS = pods.nodes()[1] * RANKS_EACH
SCHEDULER = Resources(cpu="500m", mem="512Mi", ephemeral_storage="1Gi")
RUNNER = Resources(cpu="1", mem="2Gi", ephemeral_storage="10Gi")


def cluster() -> Dask:
    """A scheduler, and a worker for each rank."""
    worker = pods.resources_of(PROFILE, RANKS_EACH)
    return Dask(
        scheduler=Scheduler(**pods.exactly(SCHEDULER)),
        workers=WorkerGroup(number_of_workers=WORKERS, **pods.exactly(worker)),
    )


@recovery.mistakes_in_inputs
@task(
    task_config=cluster(),
    **pods.launching_pod(RUNNER),
    shared_memory=PROFILE.shared_memory,  # of the workers; the plugin makes all pods from one
)
def train_on_dask(hp: Hyperparameters, data: FlyteDirectory, run_version: str) -> TrainingOutputs:
    """Train a model with distributed data parallelism on a Dask cluster, one rank to a worker.

    Returns what train_model returns.
    """
    return outputs(trained(hp, data, run_version, on_dask))


def on_dask(hp: Hyperparameters, data: Path, run_folder: Path, settings: Settings) -> Result:
    """Trains on the cluster that Flyte has set up, with the sources of this pod, or locally on one of this machine."""
    from flyte_ddp.launch import dask

    local = places.is_local()
    seconds = None if local else settings.timeout
    with dask.connected(num_ranks=hp.num_ranks, seconds=seconds) as client:
        hardware = dask.hardware(hp, client, coming=0 if local else WORKERS, seconds=settings.timeout)
        launch = partial(dask.launch, client=client, retries=pods.ENGINE_RETRIES)
        return run_training(hp, data, run_folder, settings, launch=launch, hardware=hardware)
