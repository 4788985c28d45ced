"""The training task on torch Elastic, in a single pod or several (Kubeflow's PyTorchJob)."""

from functools import partial
from pathlib import Path

from flytekit.extend import TaskPlugins
from flytekit.types.directory import FlyteDirectory
from flytekitplugins.kfpytorch.task import Elastic

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.settings import read_settings
from flyte_ddp.pods.profiles import ENGINES, read_node_range, read_profile
from flytekitplugins.ddp.elastic import ReplacedPodsTask, make_elastic_options
from tasks import pods
from tasks.flyte import flyte_task
from tasks.training import TrainingOutputs, train_and_make_outputs


class ElasticTraining(Elastic):  # type: ignore[misc]
    """The plugin's configuration as a separate type, by which flytekit chooses ReplacedPodsTask."""


TaskPlugins.register_pythontask_plugin(ElasticTraining, ReplacedPodsTask)


@flyte_task(
    task_config=ElasticTraining(
        **make_elastic_options(*read_node_range(), ENGINES["elastic"].ranks_per_node(read_profile()))
    ),
    **pods.training_pod_options(),
    cache=pods.training_cache(),
)
def train_on_elastic(hp: Hyperparameters, data: FlyteDirectory, run_version: str) -> TrainingOutputs:
    """Train a model on torch Elastic, on a single node or several, with a rank on each GPU, else on CPUs.

    The inputs are outputs of check_inputs. The outputs are those of train_model. In a PyTorchJob, one pod launches the
    ranks of all pods, and the other pods return nothing.
    """
    with train_on_elastic.open_launcher(partial(offer_data_to_ranks, hp, data)) as launch:
        return train_and_make_outputs(hp, data, run_version, launch)


def offer_data_to_ranks(hp: Hyperparameters, data: FlyteDirectory) -> None:
    """Download the prepared data to this pod's cache, where the pod's ranks look for the data.

    Waits without a limit while another process of this pod fetches the data.
    """
    from flyte_ddp.plans.data_on_host import link_data_into_host_cache

    link_data_into_host_cache(hp, Path(data.download()), read_settings().cache_folder)
