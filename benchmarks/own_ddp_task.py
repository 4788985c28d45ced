"""The first function of own_loop.py as a task with DDP of this project."""

from flytekit import task

from benchmarks import own_loop
from flytekitplugins.ddp import DDP


@task(task_config=DDP(num_ranks=2))  # type: ignore[untyped-decorator]
def join_and_add() -> float:
    return own_loop.join_and_add()
