"""The first function of own_loop.py as a task with Elastic of kfpytorch."""

from flytekit import task
from flytekitplugins.kfpytorch import Elastic

from benchmarks import own_loop


@task(task_config=Elastic(nnodes=1, nproc_per_node=2))  # type: ignore[untyped-decorator]
def join_and_add() -> float:
    return own_loop.join_and_add()
