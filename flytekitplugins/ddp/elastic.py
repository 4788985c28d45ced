"""Torch Elastic as Flyte runs it, in one pod or in those of a PyTorchJob; survives what flytekit's plugin does not."""

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

from flyte_ddp.errors import RankError
from flyte_ddp.launch.supervise.restarts import Restarts
from flyte_ddp.launch.supervise.stopping import stop_error
from flyte_ddp.loops.call import Call, pickle_by_value
from flyte_ddp.machine.process import count_out_of_memory_kills, hide_main_script
from flyte_ddp.machine.resources import Request
from flyte_ddp.pods import elastic as elastic_pods
from flyte_ddp.pods.live_page import publish_function_page
from flyte_ddp.pods.paths import resolve_folder
from flyte_ddp.pods.platforms import is_in_pod
from flyte_ddp.pods.retries import open_checkpoint_store, record_result
from flyte_ddp.runs.checkpoint import newest_step
from flyte_ddp.runs.work import Restart
from flyte_ddp.settings import read_settings, read_whole_number
from flytekitplugins.ddp import DDP
from flytekitplugins.ddp.flyte import PLATFORM, translate_errors_for_flyte
from flytekitplugins.ddp.ranks import Returned
from flytekitplugins.ddp.resources import ENGINE_RETRIES, count_ranks_per_node, take_resources
from flytekitplugins.ddp.run import do_when_written, run_in_folder, when_written
from flytekitplugins.ddp.task import Function, PodTask


def elastic_options(least: int, most: int, ranks_per_node: int) -> dict[str, Any]:
    seconds = read_whole_number(elastic_pods.MEET_VARIABLE)
    return {
        "nnodes": most if least == most else f"{least}:{most}",
        "nproc_per_node": ranks_per_node,
        "max_restarts": ENGINE_RETRIES if most > 1 else 0,  # a single pod that fails is Flyte's to retry
        "monitor_interval": 1,
        "increase_shared_mem": False,  # the task's shared_memory says the size
        "rdzv_configs": dict.fromkeys(("timeout", "join_timeout", "read_timeout"), seconds),
        # Pods that have ended keep their logs. The limit is for containers, so that one that ends at once is not
        # restarted for ever: Flyte then makes another attempt.
        "run_policy": RunPolicy(clean_pod_policy=CleanPodPolicy.RUNNING, backoff_limit=ENGINE_RETRIES * most),
    }


class ReplacedPodsTask(PytorchElasticFunctionTask):  # type: ignore[misc]  # which the plugin leaves untyped
    """The plugin's task type, which also retries after SIGTERM and lost workers, and survives a lost pod.

    With the plugin alone, SIGTERM ends the task without outputs and without an error, so that Flyte does not retry it.
    A killed worker counts as a mistake in the code. A lost pod ends its PyTorchJob; here the operator replaces the pod.
    """

    def __init__(self, task_config: Elastic, task_function: Function, **options: Any) -> None:
        """Set what the plugin sets, without its import of torch, which takes seconds of each registration."""
        least, _, most = str(task_config.nnodes).partition(":")
        kind = "python-task" if task_config.nnodes == 1 else "pytorch"
        super(PytorchElasticFunctionTask, self).__init__(
            task_config, task_function, task_type=kind, task_type_version=1, **options
        )
        self.min_nodes, self.max_nodes, self.rdzv_backend = int(least), int(most or least), "c10d"

    def get_custom(self, settings: SerializationSettings) -> Any:
        custom = super().get_custom(settings)
        if custom:
            # The plugin's configuration has no option for it.
            custom["workerReplicas"]["restartPolicy"] = "RESTART_POLICY_ON_FAILURE"
        return custom

    def launch_workers(self, function: Function, output_folder: Path, **inputs: Any) -> Any:
        """Start this node's workers, which call ``function``, and return rank 0's value.

        In a job of one pod restarts them in place; ``output_folder`` has the run's checkpoints. Elastic itself restarts
        those of several pods. Raises IgnoreOutputs if this node has no rank 0, the error of the worker that failed
        first, and StoppedError.
        """
        restarts = Restarts(read_settings().restarts if elastic_pods.is_only_pod() else 0)
        while True:
            try:
                return self.launch_once(function, restarts.without_progress, **inputs)
            except RankError as error:
                restarts.refuse_hopeless(output_folder, error)
                restarts.count(error, newest_step(output_folder) or 0)

    def launch_once(self, function: Function, restarts: Sequence[Restart], **inputs: Any) -> Any:
        """Start this node's workers once, and return rank 0's value; raise the errors of :meth:`launch_workers`.

        ``restarts`` are those in place since the newest checkpoint, which rank 0 records.
        """
        from torch.distributed.elastic.multiprocessing.api import SignalException

        from flyte_ddp.launch.elastic import first_worker_error, silence_elastic_logs, tell_restarts

        memory_kills = count_out_of_memory_kills()
        workers = copy(self)  # the plugin sends this copy's function to the workers
        workers._task_function = function
        try:
            with (
                hide_main_script(),
                silence_elastic_logs(),
                tell_restarts(restarts),
                elastic_pods.end_after_rank_0(IgnoreOutputs),
            ):
                return PytorchElasticFunctionTask._execute(workers, **inputs)
        except FlyteUserRuntimeException as error:
            raise first_worker_error(error.value, memory_kills) from None
        except IgnoreOutputs as ignored:
            stopped = ignored.__context__
            if not isinstance(stopped, SignalException):  # this node is without rank 0, and has no outputs
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
        """Run the call in the pods of the PyTorchJob, of which this is one; locally in workers of this machine."""
        if not is_in_pod():
            return super().run_body(call, run)
        folder = resolve_folder(run)  # sets the variable by which workers know the folder
        with publish_function_page(PLATFORM, folder, run):
            returned = pickle.loads(self.launch_workers(partial(run_worker, call, run), folder))
        do_when_written(partial(record_result, open_checkpoint_store(PLATFORM, run)))
        return returned


def run_worker(call: Call, run: str) -> bytes | None:
    """Run the call as the rank that this worker of Elastic's is; return on rank 0 what it has returned, pickled."""
    from flyte_ddp.launch import elastic

    def lead() -> bytes:
        # Elastic itself would send tensors as shared memory, which goes with the worker.
        return pickle_by_value(run_in_folder(call, run, Request(), elastic.launch))

    when_written.set([])  # whose actions are dropped: the pod records the result
    with translate_errors_for_flyte():
        return elastic.run_in_worker(lead)
