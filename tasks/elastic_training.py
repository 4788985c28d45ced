"""The training task on torch Elastic, in one pod or several (Kubeflow's PyTorchJob); its body runs in every rank."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flytekit import FlyteContextManager, current_context, task
from flytekit.configuration import SerializationSettings
from flytekit.exceptions.user import FlyteUserRuntimeException
from flytekit.extend import IgnoreOutputs, TaskPlugins
from flytekit.types.directory import FlyteDirectory
from flytekitplugins.kfpytorch.task import CleanPodPolicy, Elastic, PytorchElasticFunctionTask, RunPolicy

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import StoppedError, UserError
from flyte_ddp.hardware import detect
from flyte_ddp.launch.supervise.processes import main_script_hidden
from flyte_ddp.launch.supervise.stopping import stopped_by
from flyte_ddp.process import out_of_memory_kills
from flyte_ddp.run import Result, run_training
from flyte_ddp.runs import run_lock
from flyte_ddp.runs.failed_run import explain, newest_step
from flyte_ddp.settings import Settings
from tasks import command_line, places, pods, recovery
from tasks.elastic_pods import MEET_SECONDS, one_of_several
from tasks.training import TrainingOutputs, finished_before, outputs, trained

ROOT = str(Path(__file__).parents[1])


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
        """Has lost pods replaced, for which the plugin's configuration has no option."""
        custom = super().get_custom(settings)
        if custom:
            custom["workerReplicas"]["restartPolicy"] = "RESTART_POLICY_ON_FAILURE"
        return custom

    def _execute(self, **inputs: Any) -> Any:
        from torch.distributed.elastic.multiprocessing.api import SignalException

        from flyte_ddp.launch.elastic import failure, log_kept_quiet

        result = finished_before(inputs["run_version"])
        if result is not None:  # before workers are started, which would wait for their rank 0
            return outputs(result)
        if places.is_local():  # where there is one node, and no profile says how many ranks there may be
            check_host_name()
            self.min_nodes = self.max_nodes = 1
            self.task_config.nproc_per_node = detect(inputs["hp"]).num_ranks
        memory_kills = out_of_memory_kills()
        with recovery.guarded(), where_it_goes_on(inputs["run_version"]):
            try:
                with known_to_workers(), main_script_hidden(), log_kept_quiet(), one_of_several():
                    result = super()._execute(**inputs)
            except FlyteUserRuntimeException as error:
                raise failure(error.value, memory_kills) from None
            except IgnoreOutputs as ignored:
                stopped = ignored.__context__
                if not isinstance(stopped, SignalException):  # a node without rank 0, which has outputs
                    raise
                raise stopped_by(stopped.sigval, step=None) from None
            finally:
                run_lock.release_reserved()  # held for rank 0, which is another process
        return outputs(result)


TaskPlugins.register_pythontask_plugin(ElasticTraining, ElasticTrainingTask)


def check_host_name() -> None:
    """Raise UserError where this machine's name has no address: Elastic's workers would wait ten minutes for one."""
    name = socket.getfqdn()
    try:
        socket.getaddrinfo(name, None)
    except socket.gaierror as error:
        raise UserError(
            f"host name {name!r} has no address ({error.strerror}), and torch Elastic needs one; add a line "
            f"'127.0.0.1 {name}' to /etc/hosts, or run training_wf"
        ) from None


@contextmanager
def where_it_goes_on(run_version: str) -> Iterator[None]:
    """Adds to a local run's error where it continues: neither Elastic nor workers other than rank 0 know that."""
    folder = places.folder_for(run_version)
    try:
        yield
    except BaseException as error:
        if not places.is_local():
            raise
        if isinstance(error, StoppedError):
            raise StoppedError(error.signal, newest_step(folder)) from None
        explain(error, folder)
        raise


@contextmanager
def known_to_workers() -> Iterator[None]:
    """Tells workers where this project is, whether the run is local, and where its folders are."""
    where = {
        places.POD_FOLDER: "" if places.is_local() else str(current_context().working_directory),
        **run_lock.held_for_children(),
    }
    os.environ.update(where)
    sys.path.insert(0, ROOT)
    try:
        yield
    finally:
        sys.path.remove(ROOT)
        for name in where:
            os.environ.pop(name, None)


def elastic() -> ElasticTraining:
    """Elastic on as many nodes as were asked for."""
    least, most = pods.nodes()
    return ElasticTraining(
        nnodes=most if least == most else f"{least}:{most}",
        nproc_per_node=pods.ranks_of_elastic(),
        max_restarts=pods.ENGINE_RETRIES if most > 1 else 0,  # a single pod that fails is Flyte's to retry
        monitor_interval=1,
        increase_shared_mem=False,  # shared_memory of the task is what it should be
        rdzv_configs=dict.fromkeys(("timeout", "join_timeout", "read_timeout"), MEET_SECONDS),
        # Pods that have ended keep their logs. The limit is for containers, so that one that ends at once is not
        # restarted for ever: Flyte then makes another attempt.
        run_policy=RunPolicy(clean_pod_policy=CleanPodPolicy.RUNNING, backoff_limit=pods.ENGINE_RETRIES * most),
    )


@recovery.mistakes_in_inputs
@task(task_config=elastic(), **pods.training_pod())
def train_on_elastic(hp: Hyperparameters, data: FlyteDirectory, run_version: str) -> TrainingOutputs:
    """Train a model with distributed data parallelism on torch Elastic, on one node or several.

    Returns what train_model returns.
    """
    from flyte_ddp.launch import elastic

    if places.is_local():
        command_line.remove_folders_at_end()
    with elastic.recorded():
        if elastic.is_leader():
            return trained(hp, data, run_version, on_elastic)  # type: ignore[return-value]  # see _execute
        with recovery.guarded():
            elastic.follow(lambda folder: download(data, folder))
    return None  # type: ignore[return-value]  # of which the plugin makes nothing


def on_elastic(hp: Hyperparameters, data: Path, run_folder: Path, settings: Settings) -> Result:
    """Trains as rank 0."""
    from flyte_ddp.launch import elastic

    with elastic.recorded():  # before it is made into what Flyte retries
        return run_training(hp, data, run_folder, settings, launch=elastic.launch, hardware=elastic.hardware(hp))


def download(data: FlyteDirectory, folder: Path) -> None:
    """Fetches a directory from the blob store."""
    access = FlyteContextManager.current_context().file_access
    access.get_data(str(data.remote_source or data.path), str(folder), is_multipart=True)
