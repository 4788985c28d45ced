"""Task types for torch Elastic in a single pod, or in the pods of a PyTorchJob.

The tasks survive faults that end a task of flytekit's plugin.
"""

import pickle
from collections.abc import Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

from flytekit.configuration import SerializationSettings
from flytekit.exceptions.user import FlyteUserRuntimeException
from flytekit.extend import IgnoreOutputs
from flytekitplugins.kfpytorch.task import CleanPodPolicy, Elastic, PytorchElasticFunctionTask, RunPolicy

from flyte_ddp.core.errors import RankError
from flyte_ddp.core.launch.supervise.restarts import Restarts
from flyte_ddp.core.launch.supervise.stopping import stop_error
from flyte_ddp.core.loops.call import Call, pickle_by_value
from flyte_ddp.core.machine.process import count_out_of_memory_kills, hide_main_script
from flyte_ddp.core.machine.resources import Request
from flyte_ddp.core.runs.checkpoint import newest_step
from flyte_ddp.core.runs.work import Restart
from flyte_ddp.core.settings import read_settings, read_whole_number
from flyte_ddp.pods import elastic as elastic_pods
from flyte_ddp.pods.live_page import publish_function_page
from flyte_ddp.pods.paths import resolve_folder
from flyte_ddp.pods.platforms import is_in_pod
from flyte_ddp.pods.retries import open_checkpoint_store, record_result
from flytekitplugins.ddp import DDP
from flytekitplugins.ddp.flyte import PLATFORM, translate_errors_for_flyte
from flytekitplugins.ddp.ranks import Returned
from flytekitplugins.ddp.resources import ENGINE_RETRIES, count_ranks_per_node, take_resources
from flytekitplugins.ddp.run import do_when_written, run_in_folder, when_written
from flytekitplugins.ddp.task import Function, PodTask


def elastic_options(least: int, most: int, ranks_per_node: int) -> dict[str, Any]:
    """Return the options of the plugin's ``Elastic`` for a range of nodes.

    Each of ``least`` to ``most`` nodes has ``ranks_per_node`` workers.
    """
    seconds = read_whole_number(elastic_pods.MEET_VARIABLE)
    return {
        "nnodes": most if least == most else f"{least}:{most}",
        "nproc_per_node": ranks_per_node,
        "max_restarts": ENGINE_RETRIES if most > 1 else 0,  # Flyte retries a single pod
        "monitor_interval": 1,
        "increase_shared_mem": False,  # the task's shared_memory sets the size
        "rdzv_configs": dict.fromkeys(("timeout", "join_timeout", "read_timeout"), seconds),
        # Ended pods keep their logs. The limit stops endless restarts of a container that fails at once. Flyte then
        # makes another attempt.
        "run_policy": RunPolicy(clean_pod_policy=CleanPodPolicy.RUNNING, backoff_limit=ENGINE_RETRIES * most),
    }


class ReplacedPodsTask(PytorchElasticFunctionTask):  # type: ignore[misc]  # which the plugin leaves untyped
    """The plugin's task type, with retries after SIGTERM and lost workers, and with replacement of lost pods.

    With the plugin alone, SIGTERM ends the task without outputs and without an error, so Flyte does not retry the task.
    A killed worker counts as an error in the code. A lost pod ends the whole PyTorchJob, whereas here the operator
    replaces the pod.
    """

    def __init__(self, task_config: Elastic, task_function: Function, **options: Any) -> None:
        """Set the plugin's attributes without importing torch, which would slow each registration by seconds."""
        least, _, most = str(task_config.nnodes).partition(":")
        kind = "python-task" if task_config.nnodes == 1 else "pytorch"
        super(PytorchElasticFunctionTask, self).__init__(
            task_config, task_function, task_type=kind, task_type_version=1, **options
        )
        self.min_nodes, self.max_nodes, self.rdzv_backend = int(least), int(most or least), "c10d"

    def get_custom(self, settings: SerializationSettings) -> Any:
        """Return the plugin's description of the PyTorchJob, extended by restarts of failed pods."""
        custom = super().get_custom(settings)
        if custom:
            # The plugin's configuration has no option for this policy.
            custom["workerReplicas"]["restartPolicy"] = "RESTART_POLICY_ON_FAILURE"
        return custom

    def launch_workers(self, function: Function, output_folder: Path, **inputs: Any) -> Any:
        """Start this node's workers, which call ``function``, and return the value of rank 0.

        In a job with a single pod, restarts failed workers in place, from the run's checkpoints in ``output_folder``.
        In a job with several pods, Elastic itself restarts the workers.

        Raises:
            IgnoreOutputs: This node does not have rank 0.
            RankError: A worker failed. The error describes the first failure.
            UserError: The first worker that failed raised this error.
            StoppedError: A signal stopped the run.
        """
        restarts = Restarts(read_settings().restarts if elastic_pods.is_only_pod() else 0)
        while True:
            try:
                return self.launch_once(function, restarts.without_progress, **inputs)
            except RankError as error:
                restarts.raise_unless_restart_helps(output_folder, error)
                restarts.count(error, newest_step(output_folder) or 0)

    def launch_once(self, function: Function, restarts: Sequence[Restart], **inputs: Any) -> Any:
        """Start this node's workers once, and return the value of rank 0.

        Rank 0 records ``restarts``, which are the restarts in place since the newest checkpoint.

        Raises:
            IgnoreOutputs: This node does not have rank 0.
            RankError, UserError: The error of the first worker that failed.
            StoppedError, KeyboardInterrupt: A signal stopped the run.
        """
        from torch.distributed.elastic.multiprocessing.api import SignalException

        from flyte_ddp.engines.elastic import first_worker_error, pass_restarts_to_workers, silence_elastic_logs

        memory_kills = count_out_of_memory_kills()
        workers = copy(self)  # the plugin sends this copy's function to the workers
        workers._task_function = function
        try:
            with (
                hide_main_script(),
                silence_elastic_logs(),
                pass_restarts_to_workers(restarts),
                elastic_pods.end_after_rank_0(IgnoreOutputs),
            ):
                return PytorchElasticFunctionTask._execute(workers, **inputs)
        except FlyteUserRuntimeException as error:
            raise first_worker_error(error.value, memory_kills) from None
        except IgnoreOutputs as ignored:
            stopped = ignored.__context__
            if not isinstance(stopped, SignalException):  # this node does not have rank 0, so it has no outputs
                raise
            raise stop_error(stopped.sigval, step=None) from None


class ElasticTask(PodTask, ReplacedPodsTask):
    """A task whose ranks are the workers of torch Elastic in the pods of a PyTorchJob."""

    def __init__(self, config: DDP, function: Function, **options: Any) -> None:
        node = take_resources(options)
        each = config.num_ranks // config.nodes or count_ranks_per_node(node)
        engine = Elastic(**elastic_options(config.nodes, config.nodes, each))
        super().__init__(engine, function, requests=node.requests, limits=node.limits, **options)

    def run_body(self, call: Call, run: str) -> Returned:
        """Run the call in all pods of the PyTorchJob, which include this pod, and return rank 0's result.

        A local run uses workers of this machine.
        """
        if not is_in_pod():
            return super().run_body(call, run)
        folder = resolve_folder(run)  # sets the variable by which workers find the folder
        with publish_function_page(PLATFORM, folder, run):
            returned = pickle.loads(self.launch_workers(partial(run_worker, call, run), folder))
        do_when_written(partial(record_result, open_checkpoint_store(PLATFORM, run)))
        return returned


def run_worker(call: Call, run: str) -> bytes | None:
    """Run the call in this worker of Elastic. Rank 0 returns the pickled result, and other ranks return None."""
    from flyte_ddp.engines import elastic

    def lead() -> bytes:
        # Elastic would send tensors as shared memory, which disappears with the worker.
        return pickle_by_value(run_in_folder(call, run, Request(), elastic.launch))

    when_written.set([])  # a worker drops the actions, because the pod records the result
    with translate_errors_for_flyte():
        return elastic.run_in_worker(lead)
