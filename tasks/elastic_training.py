"""The training task on torch Elastic, in a single pod or several (Kubeflow's PyTorchJob).

The task's body runs in every rank.
"""

from functools import partial
from pathlib import Path
from typing import Any

from flytekit import FlyteContextManager
from flytekit.extend import TaskPlugins
from flytekit.types.directory import FlyteDirectory
from flytekitplugins.kfpytorch.task import Elastic

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.runs.run_folder import UNFINISHED
from flyte_ddp.pods.live_page import publish_report_while_training
from flyte_ddp.pods.paths import resolve_folder
from flyte_ddp.pods.platforms import is_in_pod
from flyte_ddp.pods.profiles import ENGINES, chosen_profile, read_node_range
from flytekitplugins.ddp.elastic import ReplacedPodsTask, elastic_options
from flytekitplugins.ddp.flyte import PLATFORM, translate_errors_for_flyte
from tasks import pods
from tasks.flyte import flyte_task
from tasks.training import TrainingOutputs, train_in_run_folder, training_outputs


class ElasticTraining(Elastic):  # type: ignore[misc]
    """The plugin's configuration as a separate type, by which flytekit chooses ElasticTrainingTask."""


class ElasticTrainingTask(ReplacedPodsTask):
    """The task type of :func:`train_on_elastic`, registered for ElasticTraining."""

    def _execute(self, **inputs: Any) -> Any:
        """Train, and return the outputs of rank 0.

        A local run trains in workers of this machine. A pod starts workers and publishes the report during training.
        """
        from flyte_ddp.engines import elastic

        version = inputs["run_version"]
        if not is_in_pod():
            with translate_errors_for_flyte():
                return training_outputs(train_in_run_folder(inputs["hp"], inputs["data"], version, elastic.launch))
        folder = resolve_folder(version)  # sets the variable by which workers find the folder
        with translate_errors_for_flyte(), publish_report_while_training(PLATFORM, folder):
            return training_outputs(self.launch_workers(self.task_function, folder / UNFINISHED, **inputs))


TaskPlugins.register_pythontask_plugin(ElasticTraining, ElasticTrainingTask)


@flyte_task(
    task_config=ElasticTraining(
        **elastic_options(*read_node_range(), ENGINES["elastic"].ranks_per_node(chosen_profile()))
    ),
    **pods.training_pod(),
    cache=pods.training_cache(),
)
def train_on_elastic(hp: Hyperparameters, data: FlyteDirectory, run_version: str) -> TrainingOutputs:
    """Train a model on torch Elastic, on a single node or several, with a rank in each of Elastic's workers.

    The inputs are outputs of check_inputs. The outputs are those of train_model.
    """
    from flyte_ddp.engines import elastic
    from flyte_ddp.plans.data_on_host import find_data_on_host

    run = partial(train_in_run_folder, hp, data, run_version, elastic.launch)
    prepare = partial(find_data_on_host, fetch_into=partial(download_data, data))
    # Only workers in pods run this function. _execute converts rank 0's result to outputs.
    return elastic.run_in_worker(run, prepare)  # type: ignore[arg-type, return-value]


def download_data(data: FlyteDirectory, folder: Path) -> None:
    access = FlyteContextManager.current_context().file_access
    access.get_data(str(data.remote_source or data.path), str(folder), is_multipart=True)
