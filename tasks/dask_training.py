"""The training task on Dask. Flyte sets up a cluster with a worker for each rank.

A local run uses workers of this machine.
"""

from flytekit.core.resources import ResourceSpec
from flytekit.types.directory import FlyteDirectory

from flyte_ddp.config import Hyperparameters
from flyte_ddp.pods.profiles import ENGINES, read_node_range, read_profile
from flytekitplugins.ddp.dask import RUNNER, make_dask_cluster
from flytekitplugins.ddp.resources import requests_and_limits
from flytekitplugins.ddp.run import make_engine_launcher
from tasks import pods
from tasks.flyte import flyte_task
from tasks.training import TrainingOutputs, train_and_make_outputs

PROFILE = read_profile()
RANKS_EACH = ENGINES["dask"].ranks_per_node(PROFILE)
WORKERS = read_node_range()[1] * RANKS_EACH


@flyte_task(
    task_config=make_dask_cluster(WORKERS, ResourceSpec(**requests_and_limits(PROFILE)), RANKS_EACH),
    **pods.launching_pod_options(RUNNER),
    cache=pods.training_cache(),
    shared_memory=PROFILE.shared_memory,  # of the workers: the plugin creates all pods from one template
)
def train_on_dask(hp: Hyperparameters, data: FlyteDirectory, run_version: str) -> TrainingOutputs:
    """Train a model on a Dask cluster that Flyte sets up for this task, with a rank on each worker.

    The inputs are outputs of check_inputs. The outputs are those of train_model. A local run uses
    DASK_SCHEDULER_ADDRESS, if set.
    """
    return train_and_make_outputs(hp, data, run_version, make_engine_launcher("dask", WORKERS))
