"""The Dask cluster that Flyte sets up for a task, with a worker for each rank."""

import math
from typing import Any

from flytekit.core.resources import ResourceSpec
from flytekitplugins.dask import Dask, Scheduler, WorkerGroup
from flytekitplugins.dask.task import DaskTask as PluginTask

from flyte_ddp.pods.profiles import Size
from flytekitplugins.ddp import DDP
from flytekitplugins.ddp.resources import count_ranks_per_node, divide_resources, requests_and_limits, take_resources
from flytekitplugins.ddp.task import EngineTask, Function

SCHEDULER = Size(cpu="500m", memory="512Mi", ephemeral_storage="1Gi")
RUNNER = Size(cpu="1", memory="2Gi", ephemeral_storage="10Gi")


def make_dask_cluster(workers: int, node: ResourceSpec, workers_per_node: int) -> Dask:
    parts = {kind: divide_resources(getattr(node, kind), workers_per_node) for kind in ("requests", "limits")}
    return Dask(scheduler=Scheduler(**requests_and_limits(SCHEDULER)), workers=WorkerGroup(workers, **parts))


class DaskTask(EngineTask, PluginTask):  # type: ignore[misc]  # which the plugin leaves untyped
    """A task whose ranks are the workers of a Dask cluster. The task's pod launches the ranks."""

    def __init__(self, config: DDP, function: Function, **options: Any) -> None:
        node = take_resources(options)
        self.num_ranks = self.num_hosts = config.num_ranks or config.nodes * count_ranks_per_node(node)  # a worker each
        options |= requests_and_limits(RUNNER)
        cluster = make_dask_cluster(self.num_ranks, node, math.ceil(self.num_ranks / config.nodes))
        super().__init__(cluster, function, **options)
