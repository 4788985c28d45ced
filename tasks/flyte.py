"""Flyte as the platform that runs tasks: an implementation of flyte_ddp.pods.platforms.Platform, and types of outputs.

Import PythonPickledFile from here for an input or output of a task. With python-magic installed, flytekit looks into
local files and accepts only libmagic's MIME type of bare pickles. This module replaces flytekit's transformer of the
type by one that also accepts torch's zip format.
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

from flytekit import Deck, FlyteContextManager, task
from flytekit.configuration import LocalConfig
from flytekit.core.context_manager import ExecutionState
from flytekit.core.type_engine import AsyncTypeTransformer, TypeEngine
from flytekit.exceptions.system import FlyteNonRecoverableSystemException
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile
from flytekit.types.file.file import FlyteFilePathTransformer

from flyte_ddp.errors import UserError
from flyte_ddp.pods import retries
from flyte_ddp.pods.platforms import EXECUTION_ID, is_in_pod

__all__ = ["PythonPickledFile"]  # others import it from here
FileType = TypeVar("FileType", bound=FlyteFile)


def remove_execution_id_outside_tasks() -> None:
    """Remove FLYTE_INTERNAL_EXECUTION_ID from the environment, unless Flyte executes a task in this process.

    So ``pyflyte run`` and notebooks of a person inside a pod, such as a workspace in the cluster, are local runs.
    Flyte's pyflyte-execute has set the mode TASK_EXECUTION by now; Elastic's workers always have it.
    """
    state = FlyteContextManager.current_context().execution_state
    if state is None or state.mode is not ExecutionState.Mode.TASK_EXECUTION:
        os.environ.pop(EXECUTION_ID, None)


class Flyte:
    """Facts about the Flyte task that runs now, and Flyte's ways to take over a page and an error."""

    def disk_limit(self) -> str:
        """Return this task's limit of ephemeral storage; "" for tasks of engines, whose operators make the pods."""
        module, _, name = os.environ.get("FLYTE_INTERNAL_TASK_NAME", "").rpartition(".")
        task = getattr(sys.modules.get(module), name, None)
        return "" if task is None or task.task_type != "python-task" else str(task.resources.limits.ephemeral_storage)

    def is_retraining_requested(self) -> bool:
        """Return whether this is ``pyflyte run --overwrite-cache``, or Flyte's local cache is off."""
        cache = LocalConfig.auto()
        return bool(cache.cache_overwrite or not cache.cache_enabled)

    def output_address(self) -> str:
        """Return the address below which Flyte has this attempt write its raw outputs. Only for pods."""
        return str(FlyteContextManager.current_context().file_access.raw_output_prefix)

    def publish_page(self, title: str, html: str) -> None:
        """Replace the HTML of this task's deck of that title, or add a deck; then upload all decks of the task.

        flytekit publishes no deck of a dynamic task, so a context is set in which any task looks like an ordinary one.
        """
        context = FlyteContextManager.current_context()
        state = context.execution_state.with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
        with FlyteContextManager.with_context(context.with_execution_state(state)):
            decks = [deck for deck in context.user_space_params.decks if deck.name == title]
            deck = decks[0] if decks else Deck(title)
            deck._html = html  # Deck itself can only append
            Deck.publish()

    def retryable_error(self, message: str) -> Exception:
        """Return a FlyteRecoverableException, the one exception after which Flyte starts another attempt."""
        return FlyteRecoverableException(message)


PLATFORM = Flyte()
# Flyte counts any exception but its own retryable one as final.
translate_errors_for_flyte = partial(retries.raise_retryable_errors, PLATFORM)


def flyte_task(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a function a Flyte task with these options of flytekit's ``task``.

    Flyte makes another attempt after errors that :func:`translate_errors_for_flyte` replaces, and counts a UserError
    for an input as the user's: flytekit reports any error before the body as the system's, so this replaces the task's
    ``dispatch_execute``.
    """

    def make_task(function: Callable[..., Any]) -> Any:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:  # not by the decorator of a context manager: Elastic pickles it
            with translate_errors_for_flyte():
                return function(*args, **kwargs)

        def dispatch(*args: Any, **kwargs: Any) -> Any:
            try:
                return dispatch_execute(*args, **kwargs)
            except FlyteNonRecoverableSystemException as error:
                mistake = error.value  # flytekit may have wrapped our exception in one of its own
                while mistake is not None and not isinstance(mistake, UserError):
                    mistake = mistake.__cause__ or mistake.__context__
                if mistake is None:
                    raise
                raise FlyteUserRuntimeException(mistake) from mistake

        made = task(**options)(run)
        dispatch_execute, made.dispatch_execute = made.dispatch_execute, dispatch
        return made

    return make_task


def output_file(kind: type[FileType], path: Path) -> FileType:
    """Return a file as a task's output, of type FlyteFile or PythonPickledFile.

    Locally the file stays; in a pod flytekit uploads it at the task's end.
    """
    return kind(str(path)) if is_in_pod() else kind(str(path), remote_path=False)


def output_folder(path: Path) -> FlyteDirectory:
    """Return a folder as a task's output. Locally the folder stays; in a pod flytekit uploads it at the task's end."""
    return FlyteDirectory(str(path)) if is_in_pod() else FlyteDirectory(str(path), remote_directory=False)


class PickledFileTransformer(FlyteFilePathTransformer):  # type: ignore[misc]  # which flytekit leaves untyped
    """Flytekit's transformer of PythonPickledFile, which also accepts zip files."""

    def __init__(self) -> None:
        AsyncTypeTransformer.__init__(self, name="PythonPickledFile", t=PythonPickledFile)

    def get_mime_type_from_extension(self, extension: str) -> str | Sequence[str]:
        """Return the MIME types that a local file with this extension may have: flytekit's and zip's."""
        known = super().get_mime_type_from_extension(extension)
        return [known, "application/zip"] if isinstance(known, str) else [*known, "application/zip"]


TypeEngine.register(PickledFileTransformer())
