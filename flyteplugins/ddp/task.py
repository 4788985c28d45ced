"""The task type behind ``DDP``: sends a task's body to the ranks, and returns the value of rank 0.

The import is kept light, because each command that runs a task of this plugin imports this module first.
"""

import asyncio
import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from flyte.extend import AsyncFunctionTaskTemplate

from flyte_ddp.pods.platforms import is_in_pod

if TYPE_CHECKING:
    from flyte_ddp.core.loops.call import Call


@dataclass(kw_only=True)
class DDPTask(AsyncFunctionTaskTemplate[..., Any, Callable[..., Any]]):
    """A task whose body runs on several ranks in the task's pod."""

    async def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body on all ranks, and return the value of rank 0. In a pod, uploads the value's local files.

        Blocks the event loop, because Python handles SIGTERM in the main thread only.
        """
        from flyte_ddp.core.machine.resources import Request
        from flyte_ddp.task_bodies.user_function import name_run, run_in_folder
        from flyteplugins.ddp.platform import PLATFORM, translate_errors

        with translate_errors():
            inputs = inspect.signature(self.func).bind(*args, **kwargs).arguments
            call = make_call(self.name, self.func, inputs)
            config: Any = self.plugin_config
            request = Request(config.num_ranks, exact=True)
            value = run_in_folder(PLATFORM, call, name_run(self.name, call), request, None)
            return upload_local_files(value) if is_in_pod() else value


def upload_local_files(value: Any) -> Any:
    """Return a value with local files and folders uploaded, also in fields, lists, tuples and dicts."""
    from flyte.io import Dir, File

    if isinstance(value, (File, Dir)):
        is_local = "://" not in value.path
        return type(value).from_local_sync(value.path) if is_local else value
    if is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in fields(value):
            object.__setattr__(changed, field.name, upload_local_files(getattr(value, field.name)))
        return changed
    if isinstance(value, dict):
        return {key: upload_local_files(each) for key, each in value.items()}
    return type(value)(map(upload_local_files, value)) if type(value) in (list, tuple) else value


def make_call(task: str, function: Callable[..., Any], inputs: dict[str, Any]) -> "Call":
    """Return the Call by which each rank calls :func:`run_body` with a task's function and inputs.

    Raises:
        UserError: The inputs cannot be pickled, or a module was changed after its import.
    """
    from flyte_ddp import calls
    from flyte_ddp.core.loops.call import Call

    code, user_code = calls.compute_code_digest_and_modules(function)
    shown = {name: calls.make_comparable_value(value, replace_file) for name, value in inputs.items()}
    payload = calls.pickle_for_ranks(task, run_body, function, inputs)
    return Call(calls.get_function_name(function), payload, shown, code, user_code)


def replace_file(value: Any) -> Any:
    """Return the address of a file or folder, or the fields of a dataclass by name. Returns other values unchanged."""
    from flyte.io import Dir, File

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
