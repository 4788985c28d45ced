"""The training task on torch Elastic, in one pod or several (Kubeflow's PyTorchJob); its body runs in every rank."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flytekit import FlyteContextManager
from flytekit.extend import TaskPlugins
from flytekit.types.directory import FlyteDirectory
from flytekitplugins.kfpytorch.task import Elastic

from flyte_ddp.config import Hyperparameters
from flyte_ddp.hardware import choose_hardware, request_ranks
from flyte_ddp.machine import detect_capacity
from flyte_ddp.pods import elastic as elastic_pods
from flyte_ddp.pods.live_page import publish_report_while_training
from flyte_ddp.pods.paths import resolve_folder
from flyte_ddp.pods.platforms import is_in_pod
from flyte_ddp.pods.profiles import elastic_ranks_per_node, node_range
from flyte_ddp.run import Result, run_training
from flyte_ddp.runs.run_folder import release_reserved_folders
from flyte_ddp.settings import Settings
from flytekitplugins.ddp.elastic import ReplacedPodsTask, elastic_options
from flytekitplugins.ddp.flyte import PLATFORM, translate_errors_for_flyte
from tasks import command_line, pods
from tasks.flyte import flyte_task
from tasks.training import TrainingOutputs, read_finished_run, train_in_run_folder, training_outputs

ROOT = Path(__file__).parents[1]


@dataclass
class ElasticTraining(Elastic):  # type: ignore[misc]
    """The plugin's configuration, under a type of our own, for which ElasticTrainingTask is registered."""


class ElasticTrainingTask(ReplacedPodsTask):
    """The task type of :func:`train_on_elastic`, which is registered for ElasticTraining."""

    def _execute(self, **inputs: Any) -> Any:
        """Start this node's workers, wait for their end, and return rank 0's outputs.

        A pod with rank 0 publishes the console's page meanwhile: Flyte's decks are of this process, not of workers.
        """
        version = inputs["run_version"]
        result = read_finished_run(version)
        if result is not None:  # before workers are started, which would wait for their rank 0
            return training_outputs(result)
        if not is_in_pod():  # then there is one node, and no profile limits the number of ranks
            elastic_pods.refuse_unresolvable_host_name()
            self.min_nodes = self.max_nodes = 1
            self.task_config.nproc_per_node = detect_capacity(request_ranks(inputs["hp"])).num_ranks
        folder = resolve_folder(version)  # in a pod, sets the variable by which workers know the folder
        page = publish_report_while_training(PLATFORM, folder) if elastic_pods.has_rank_0() else nullcontext()
        with translate_errors_for_flyte(), page, elastic_pods.add_step_to_error(version):
            try:
                result = self.launch_workers(self.task_function, ROOT, **inputs)
            finally:
                release_reserved_folders()  # the lock was for rank 0, which is another process
        return training_outputs(result)


TaskPlugins.register_pythontask_plugin(ElasticTraining, ElasticTrainingTask)


@flyte_task(
    task_config=ElasticTraining(**elastic_options(*node_range(), elastic_ranks_per_node())), **pods.training_pod()
)
def train_on_elastic(hp: Hyperparameters, data: FlyteDirectory, run_version: str) -> TrainingOutputs:
    """Train a model on torch Elastic, on one node or several, with a rank in each of Elastic's workers.

    Takes what check_inputs returns, and returns what train_model does.
    """
    from flyte_ddp.launch import elastic
    from flyte_ddp.launch.remote.elastic_link import pickle_exception
    from flyte_ddp.training.on_host import find_or_fetch_data

    if not is_in_pod():
        command_line.remove_temporary_folders_at_exit()
    with pickle_exception(), translate_errors_for_flyte():
        if elastic.is_leader():
            # _execute makes outputs of the result.
            return train_in_run_folder(hp, data, run_version, launch_as_leader, page=False)  # type: ignore[return-value]
        elastic.follow(partial(find_or_fetch_data, fetch_into=partial(download_data, data)))
    return None  # type: ignore[return-value]  # the plugin takes rank 0's outputs


def launch_as_leader(hp: Hyperparameters, data: Path, run_folder: Path, settings: Settings) -> Result:
    """Train as rank 0 and return the result; pickle an exception for Elastic before Flyte's error replaces it."""
    from flyte_ddp.launch import elastic
    from flyte_ddp.launch.remote.elastic_link import pickle_exception

    with pickle_exception():
        hardware = choose_hardware(hp, elastic.find_capacity(request_ranks(hp)))
        return run_training(hp, data, run_folder, settings, launch=elastic.launch, hardware=hardware)


def download_data(data: FlyteDirectory, folder: Path) -> None:
    access = FlyteContextManager.current_context().file_access
    access.get_data(str(data.remote_source or data.path), str(folder), is_multipart=True)
