"""The configuration ``@task(task_config=DDP(num_ranks=2))`` of a user-defined task whose body runs on several ranks.

The task's outputs are the return value of rank 0. The import is kept light, because flytekit imports this module at
each start.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flytekit.extend import TaskPlugins

__all__ = ["DDP"]


@dataclass(frozen=True)
class DDP:
    """Number of ranks that run a task's body, and the pods for them.

    Restarts after a failure follow flytekit's ``retries=`` (default: none).

    Args:
        num_ranks: Number of ranks over all nodes. 0 starts a rank for each requested GPU, else for each CPU, up to 4 on
            a node.
        nodes: Number of pods for the ranks, each with the task's requests and limits. More than 1 requires an engine.
        engine: elastic, ray or dask creates the pods, by an operator in the cluster. "" uses the task's pod.

    Raises:
        UserError: The values are invalid or inconsistent.
    """

    num_ranks: int = 0
    nodes: int = 1
    engine: str = ""

    def __post_init__(self) -> None:
        from flyte_ddp.core.errors import UserError, unknown_name_error
        from flyte_ddp.pods.profiles import ENGINES

        if self.engine and self.engine not in ENGINES:
            raise unknown_name_error("engine", self.engine, ENGINES)
        if type(self.num_ranks) is not int or self.num_ranks < 0:
            raise UserError(f"num_ranks={self.num_ranks!r}: must be a number of ranks, or 0 for a rank on each GPU")
        if type(self.nodes) is not int or self.nodes < 1:
            raise UserError(f"nodes={self.nodes!r}: must be a number of pods, at least 1")
        if self.nodes > 1 and not self.engine:
            raise UserError(f"nodes={self.nodes}: several pods need an engine; choose one of {', '.join(ENGINES)}")
        if self.num_ranks % self.nodes and self.engine == "elastic":
            raise UserError(
                f"num_ranks={self.num_ranks} on nodes={self.nodes}: torch Elastic runs the same number of ranks on "
                "each node; set num_ranks to a multiple of nodes"
            )


class DDPTask:
    """Stand-in for the task types of this plugin. A call returns a task of the type that the configuration needs."""

    def __new__(cls, task_config: DDP, task_function: Callable[..., Any], **options: Any) -> Any:
        from flytekitplugins.ddp.task import make_task

        return make_task(task_config, task_function, options)


TaskPlugins.register_pythontask_plugin(DDP, DDPTask)
