"""Data set to model on torch Elastic, on several nodes: a clustered task, which is a JobSet of Kubernetes.

Run it with ``flyte run --local flyte2/elastic_training.py elastic_training --hp '{"epochs": 2}'``.
"""

from flyte.clustered import ClusteredTaskEnvironment
from flyte.io import Dir

from flyte2 import pods
from flyte2.files import download
from flyte2.inputs import HyperparametersInput, to_input
from flyte2.schedules import scheduled_task
from flyte2.training import TrainingOutputs, check_inputs, train_and_make_outputs
from flyte_ddp.core.settings import read_settings
from flyte_ddp.pods.profiles import ENGINES, read_node_range
from flyteplugins.ddp.clustered import open_launcher
from flyteplugins.ddp.platform import task

ELASTIC = pods.make_training_environment(
    "elastic",
    pods.PROFILE,
    ClusteredTaskEnvironment,
    replicas=read_node_range()[1],
    nproc_per_node=ENGINES["elastic"].ranks_per_node(pods.PROFILE),
)
pods.CHECKS.add_dependency(ELASTIC)


@task(ELASTIC, **pods.training_options())
def train_on_elastic(hp: HyperparametersInput, data: Dir, run_version: str) -> TrainingOutputs:
    """Train a model with distributed data parallelism on several nodes, with a rank on each GPU, else on CPUs.

    The worker with rank 0 launches the ranks of all pods, and returns the outputs of train_model. Each other worker
    runs a rank, and returns nothing.
    """
    checked = hp.check()

    def link_data_for_ranks() -> None:
        from flyte_ddp.plans.data_on_host import link_data_into_host_cache

        link_data_into_host_cache(checked, download(data), read_settings().cache_folder)

    with open_launcher(link_data_for_ranks) as launch:
        return train_and_make_outputs(checked, data, run_version, launch)


@scheduled_task(pods.CHECKS, "elastic_training_wf", retries=pods.RETRIES)
async def elastic_training(hp: HyperparametersInput = HyperparametersInput()) -> TrainingOutputs:
    """Train a model on several nodes. A run with the same hyperparameters, data and code is answered from the cache.

    Returns the outputs of training. The deployment sets the number of nodes (FLYTE_DDP_NODES) and their size
    (FLYTE_DDP_PROFILE). For a range of nodes such as 2:4, the number is 4.

    Args:
        hp: Model, data and training settings. Omitted fields have their defaults.
    """
    checked = await check_inputs(hp.check(), engine="elastic")
    return await train_on_elastic(to_input(checked.hp), checked.data, checked.run_version)
