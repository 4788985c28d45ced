"""The training task on torch Elastic, in one pod or several (Kubeflow's PyTorchJob); its body runs in every rank."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flytekit import FlyteContextManager, task
from flytekit.configuration import SerializationSettings
from flytekit.exceptions.user import FlyteUserRuntimeException
from flytekit.extend import IgnoreOutputs, TaskPlugins
from flytekit.types.directory import FlyteDirectory
from flytekitplugins.kfpytorch.task import CleanPodPolicy, Elastic, PytorchElasticFunctionTask, RunPolicy

from flyte_ddp.config import Hyperparameters
from flyte_ddp.hardware import detect
from flyte_ddp.launch.supervise.processes import main_script_hidden
from flyte_ddp.launch.supervise.stopping import stop_error
from flyte_ddp.pods.elastic import (
    add_newest_step,
    check_host_name,
    environment_for_workers,
    meet_seconds,
    one_of_several_pods,
)
from flyte_ddp.pods.profiles import elastic_ranks_per_node, node_range
from flyte_ddp.process import out_of_memory_kills
from flyte_ddp.run import Result, run_training
from flyte_ddp.runs import run_lock
from flyte_ddp.settings import Settings
from tasks import command_line, pods
from tasks.flyte import PLATFORM, report_refused_inputs, translate_errors_for_flyte
from tasks.training import TrainingOutputs, read_finished_run, train_in_run_folder, training_outputs

ROOT = Path(__file__).parents[1]


@dataclass
class ElasticTraining(Elastic):  # type: ignore[misc]
    """Elastic's configuration, for the task type below."""


class ElasticTrainingTask(PytorchElasticFunctionTask):  # type: ignore[misc]
    """The plugin's task with another treatment of failures, of rank 0's result, and of lost pods.

    With the plugin SIGTERM ends the task without outputs and without an error, so that Flyte does not retry it. It
    counts a killed worker as a mistake in the code. And a lost pod ends its PyTorchJob; here the operator replaces the
    pod, and the ranks of all pods continue from the checkpoint.
    """

    def get_custom(self, settings: SerializationSettings) -> Any:
        """Have lost pods replaced, for which the plugin's configuration has no option."""
        custom = super().get_custom(settings)
        if custom:
            custom["workerReplicas"]["restartPolicy"] = "RESTART_POLICY_ON_FAILURE"
        return custom

    def _execute(self, **inputs: Any) -> Any:
        from torch.distributed.elastic.multiprocessing.api import SignalException

        from flyte_ddp.launch.elastic import failure, log_kept_quiet

        result = read_finished_run(inputs["run_version"])
        if result is not None:  # before workers are started, which would wait for their rank 0
            return training_outputs(result)
        if PLATFORM.is_local():  # where there is one node, and no profile says how many ranks there may be
            check_host_name()
            self.min_nodes = self.max_nodes = 1
            self.task_config.nproc_per_node = detect(inputs["hp"]).num_ranks
        memory_kills = out_of_memory_kills()
        with translate_errors_for_flyte(), add_newest_step(PLATFORM, inputs["run_version"]):
            try:
                with (
                    environment_for_workers(PLATFORM, ROOT),
                    main_script_hidden(),
                    log_kept_quiet(),
                    one_of_several_pods(IgnoreOutputs),
                ):
                    result = super()._execute(**inputs)
            except FlyteUserRuntimeException as error:
                raise failure(error.value, memory_kills) from None
            except IgnoreOutputs as ignored:
                stopped = ignored.__context__
                if not isinstance(stopped, SignalException):  # a node without rank 0, which has outputs
                    raise
                raise stop_error(stopped.sigval, step=None) from None
            finally:
                run_lock.release_reserved()  # held for rank 0, which is another process
        return training_outputs(result)


TaskPlugins.register_pythontask_plugin(ElasticTraining, ElasticTrainingTask)


def elastic_config() -> ElasticTraining:
    """Return Elastic's configuration for as many nodes as were asked for."""
    least, most = node_range()
    return ElasticTraining(
        nnodes=most if least == most else f"{least}:{most}",
        nproc_per_node=elastic_ranks_per_node(),
        max_restarts=pods.ENGINE_RETRIES if most > 1 else 0,  # a single pod that fails is Flyte's to retry
        monitor_interval=1,
        increase_shared_mem=False,  # shared_memory of the task is what it should be
        rdzv_configs=dict.fromkeys(("timeout", "join_timeout", "read_timeout"), meet_seconds()),
        # Pods that have ended keep their logs. The limit is for containers, so that one that ends at once is not
        # restarted for ever: Flyte then makes another attempt.
        run_policy=RunPolicy(clean_pod_policy=CleanPodPolicy.RUNNING, backoff_limit=pods.ENGINE_RETRIES * most),
    )


@report_refused_inputs
@task(task_config=elastic_config(), **pods.training_pod())
def train_on_elastic(hp: Hyperparameters, data: FlyteDirectory, run_version: str) -> TrainingOutputs:
    """Train a model with distributed data parallelism on torch Elastic, on one node or several.

    Returns what train_model returns.
    """
    from flyte_ddp.launch import elastic

    if PLATFORM.is_local():
        command_line.remove_folders_at_end()
    with elastic.recorded():
        if elastic.is_leader():
            return train_in_run_folder(hp, data, run_version, launch_as_leader)  # type: ignore[return-value]  # see _execute
        with translate_errors_for_flyte():
            elastic.follow(lambda folder: download_data(data, folder))
    return None  # type: ignore[return-value]  # of which the plugin makes nothing


def launch_as_leader(hp: Hyperparameters, data: Path, run_folder: Path, settings: Settings) -> Result:
    """Train as rank 0, whose failure is recorded before it becomes what Flyte retries."""
    from flyte_ddp.launch import elastic

    with elastic.recorded():
        return run_training(hp, data, run_folder, settings, launch=elastic.launch, hardware=elastic.hardware(hp))


def download_data(data: FlyteDirectory, folder: Path) -> None:
    """Download a directory from the blob store into a folder."""
    access = FlyteContextManager.current_context().file_access
    access.get_data(str(data.remote_source or data.path), str(folder), is_multipart=True)
