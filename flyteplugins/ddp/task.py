"""The task type behind ``DDP``: sends a task's body to the ranks, and returns the value of rank 0."""

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from flyte.extend import AsyncFunctionTaskTemplate
from flyte.io import Dir, File

from flyte_ddp.calls import (
    compute_code_digest_and_modules,
    get_function_name,
    make_comparable_value,
    pickle_for_ranks,
)
from flyte_ddp.core.loops.call import Call
from flyte_ddp.core.machine.resources import Request
from flyte_ddp.task_bodies.user_function import name_run, run_in_folder
from flyteplugins.ddp.platform import PLATFORM, translate_errors


@dataclass(kw_only=True)
class DDPTask(AsyncFunctionTaskTemplate[..., Any, Callable[..., Any]]):
    """A task whose body runs on several ranks in the task's pod."""

    async def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body on all ranks, and return the value of rank 0.

        Blocks the event loop, because Python handles SIGTERM in the main thread only.
        """
        with translate_errors():
            inputs = inspect.signature(self.func).bind(*args, **kwargs).arguments
            call = make_call(self.name, self.func, inputs)
            config: Any = self.plugin_config
            request = Request(config.num_ranks, exact=True)
            return run_in_folder(PLATFORM, call, name_run(self.name, call), request, None)


def make_call(task: str, function: Callable[..., Any], inputs: dict[str, Any]) -> Call:
    """Return the Call by which each rank calls :func:`run_body` with a task's function and inputs.

    Raises:
        UserError: The inputs cannot be pickled, or a module has changed.
    """
    code, user_code = compute_code_digest_and_modules(function)
    shown = {name: make_comparable_value(value, replace_file) for name, value in inputs.items()}
    return Call(get_function_name(function), pickle_for_ranks(task, run_body, function, inputs), shown, code, user_code)


def replace_file(value: Any) -> Any:
    """Return the address of a file or folder, or the fields of a dataclass by name. Returns other values unchanged."""
    if isinstance(value, (File, Dir)):
        return value.path
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return value


def run_body(function: Callable[..., Any], inputs: dict[str, Any]) -> Any:
    """Call a task's function in this rank. Rank 0 returns the value, and other ranks None."""
    from flyte_ddp.core.loops.current_rank import current_rank  # imports torch

    value = function(**inputs)
    value = asyncio.run(value) if inspect.iscoroutine(value) else value
    return None if current_rank().rank else value
