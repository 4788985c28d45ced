"""Task types for torch Elastic in a single pod, or in the pods of a PyTorchJob.

The tasks survive faults that end a task of flytekit's plugin.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from flytekit import PythonFunctionTask, current_context
from flytekit.configuration import SerializationSettings
from flytekit.extend import IgnoreOutputs
from flytekitplugins.kfpytorch.task import CleanPodPolicy, Elastic, PytorchElasticFunctionTask, RunPolicy

from flyte_ddp.core.loops.call import Call
from flyte_ddp.core.machine.resources import Request
from flyte_ddp.core.runs.work import Launch
from flyte_ddp.core.settings import read_whole_number_variable
from flyte_ddp.pods import elastic as pods
from flyte_ddp.pods.platforms import is_in_pod
from flytekitplugins.ddp import DDP
from flytekitplugins.ddp.ranks import Returned
from flytekitplugins.ddp.resources import ENGINE_RETRIES, count_ranks_per_node, take_resources
from flytekitplugins.ddp.run import run_in_folder
from flytekitplugins.ddp.task import Function, PodTask


def make_elastic_options(least: int, most: int, ranks_per_node: int) -> dict[str, Any]:
    """Return the options of the plugin's ``Elastic`` for ``least`` to ``most`` nodes of ``ranks_per_node`` workers."""
    seconds = read_whole_number_variable(pods.MEET_VARIABLE)
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
    """The plugin's task type, whose function runs in one pod and launches the ranks of all pods.

    With the plugin alone, the function runs in each of Elastic's workers. SIGTERM ends the task without outputs and
    without an error, so Flyte does not retry the task. A killed worker counts as an error in the code. A lost pod ends
    the whole PyTorchJob, whereas here the operator replaces the pod.
    """

    execute = PythonFunctionTask.execute

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

    @contextmanager
    def open_launcher(self, prepare: Callable[[], object] = lambda: None) -> Iterator[Launch]:
        """Yield the launcher of the task's ranks, on this machine or on all pods of a PyTorchJob.

        Only one pod gets the launcher. In any other pod, calls ``prepare``, runs the pod's ranks until the job is over,
        and raises IgnoreOutputs in place of the block.

        Raises:
            IgnoreOutputs: The job is over, and the launcher is in another pod.
            UnreachableError: The pods did not meet within FLYTE_DDP_MEET_SECONDS.
        """
        from flyte_ddp.engines import elastic

        if not is_in_pod() or pods.is_only_pod():
            yield elastic.launch
            return
        config, execution = self.task_config, current_context().execution_id.name
        nodes = self.min_nodes, self.max_nodes
        with pods.join_job(execution, nodes, config.nproc_per_node, config.max_restarts, config.rdzv_configs) as node:
            if not pods.has_launcher():
                prepare()
                pods.run_ranks_until_end(node)
                raise IgnoreOutputs
            with node.run_in_thread():
                yield partial(elastic.launch, node=node)


class ElasticTask(PodTask, ReplacedPodsTask):
    """A task whose ranks run in the pods of a PyTorchJob. One of the pods launches the ranks."""

    def __init__(self, config: DDP, function: Function, **options: Any) -> None:
        node = take_resources(options)
        each = config.num_ranks // config.nodes or count_ranks_per_node(node)
        engine = Elastic(**make_elastic_options(config.nodes, config.nodes, each))
        super().__init__(engine, function, requests=node.requests, limits=node.limits, **options)

    def run_body(self, call: Call, run: str) -> Returned:
        request = Request() if is_in_pod() else Request(self.ddp.num_ranks, exact=True)
        with self.open_launcher() as launch:
            return run_in_folder(call, run, request, launch)
