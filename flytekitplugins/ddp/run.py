"""Launch the ranks of a task, and act when flytekit has written the task's outputs."""

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from typing import Any

from flyte_ddp.core.launch.engine import EngineLaunch
from flyte_ddp.core.loops.call import Call
from flyte_ddp.core.machine.resources import Request
from flyte_ddp.core.runs.work import Launch
from flyte_ddp.pods.platforms import is_in_pod
from flyte_ddp.task_bodies import user_function
from flytekitplugins.ddp.flyte import PLATFORM
from flytekitplugins.ddp.resources import ENGINE_RETRIES

# Actions to run when flytekit has written the outputs.
when_written: ContextVar[list[Callable[[], None]] | None] = ContextVar("when_written", default=None)


def call_when_outputs_written(action: Callable[[], None]) -> None:
    """Call ``action`` later, when flytekit has written the task's outputs.

    If this process executes no RanksTask, as in a map task, calls ``action`` at once.
    """
    waiting = when_written.get()
    if waiting is None:
        action()
    else:
        waiting.append(action)


def make_engine_launcher(engine: str, hosts: int) -> Launch:
    launch: EngineLaunch = import_module(f"flyte_ddp.engines.{engine}").launch
    return partial(launch, retries=ENGINE_RETRIES, awaited_hosts=hosts if is_in_pod() else 0)


def run_in_folder(call: Call, run: str, request: Request, launch: Launch | None) -> Any:
    """Run a call on ranks in the folder named ``run``, and return the result of rank 0.

    When flytekit has written the outputs, removes the checkpoints and records the result. ``launch`` starts the ranks
    (None: on this machine).
    """
    return user_function.run_in_folder(PLATFORM, call, run, request, launch, defer=call_when_outputs_written)
