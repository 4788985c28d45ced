"""The training task on Ray: a cluster that Flyte sets up for the run, or a running one, or locally this machine."""

from functools import partial
from pathlib import Path

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekitplugins.ray import HeadNodeConfig, RayJobConfig, WorkerNodeConfig

from flyte_ddp.config import Hyperparameters
from flyte_ddp.run import Result, run_training
from flyte_ddp.settings import Settings
from tasks import pods, recovery
from tasks.training import TrainingOutputs, outputs, trained


def cluster() -> RayJobConfig:
    """A head that takes no ranks, and nodes of the profile's size."""
    least, most = pods.nodes()
    node = pods.resources_of(pods.PROFILES[pods.chosen_profile()])
    return RayJobConfig(
        head_node_config=HeadNodeConfig(
            ray_start_params={"num-cpus": "0"}, requests=pods.LAUNCHING, limits=pods.LAUNCHING
        ),
        worker_node_config=[
            WorkerNodeConfig("ranks", replicas=most, min_replicas=least, max_replicas=most, requests=node, limits=node)
        ],
        enable_autoscaling=least < most,
        shutdown_after_job_finishes=True,
    )


@recovery.mistakes_in_inputs
@task(task_config=cluster(), **pods.launching_pod(), cache=pods.by_run(), enable_deck=True, deck_fields=())
def train_on_ray(hp: Hyperparameters, data: FlyteDirectory, run_version: str) -> TrainingOutputs:
    """Train a model with distributed data parallelism on a Ray cluster, a GPU for each rank, or CPUs.

    Returns what train_model returns.
    """
    return outputs(trained(hp, data, run_version, on_ray))


def on_ray(hp: Hyperparameters, data: Path, run_folder: Path, settings: Settings) -> Result:
    """Trains on the cluster that Ray is connected to, which Flyte's plugin sees to."""
    from flyte_ddp.launch import ray

    with ray.connected():
        launch = partial(ray.launch, max_retries=pods.ENGINE_RETRIES)
        return run_training(hp, data, run_folder, settings, launch=launch, hardware=ray.hardware(hp))
