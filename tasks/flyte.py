"""Flyte as the platform that runs tasks: an implementation of flyte_ddp.pods.platforms.Platform with flytekit."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from flytekit import Deck, FlyteContextManager
from flytekit.configuration import LocalConfig
from flytekit.core.base_task import PythonTask
from flytekit.exceptions.system import FlyteNonRecoverableSystemException
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.errors import UserError
from flyte_ddp.pods import retries
from flyte_ddp.pods.platforms import is_in_pod

AnyTask = TypeVar("AnyTask", bound=PythonTask)
FileType = TypeVar("FileType", bound=FlyteFile)


class ReplaceablePage(Deck):  # type: ignore[misc]  # which flytekit leaves untyped
    """A deck whose page can be replaced; Deck can only append."""

    page = ""

    @property
    def html(self) -> str:
        """The newest page."""
        return self.page


class Flyte:
    """Facts about the Flyte task that runs now, and Flyte's ways to take over a page and an error."""

    def disk_limit(self) -> str:
        """Return this task's limit of ephemeral storage; empty for tasks of engines, whose operators make the pods."""
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
        """Replace the page of this task's deck of that title, or add the deck; then upload all decks of the task."""
        decks = FlyteContextManager.current_context().user_space_params.decks
        replaceable = [deck for deck in decks if isinstance(deck, ReplaceablePage) and deck.name == title]
        deck = replaceable[0] if replaceable else ReplaceablePage(title)
        deck.page = html
        Deck.publish()

    def retryable_error(self, message: str) -> Exception:
        """Return a FlyteRecoverableException, the one exception after which Flyte starts another attempt."""
        return FlyteRecoverableException(message)


PLATFORM = Flyte()
translate_errors_for_flyte = partial(retries.translate_errors, PLATFORM)  # Flyte counts any other exception as final
sync_checkpoints = partial(retries.sync_checkpoints, PLATFORM)


def report_refused_inputs(task: AnyTask) -> AnyTask:
    """Make Flyte count a UserError for an input as the user's: replace a task's ``dispatch_execute``; return the task.

    flytekit reports any error before the task's body as the system's. Use as a decorator above ``@task``.
    """
    dispatch_execute = task.dispatch_execute

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        """Execute the task; raise FlyteUserRuntimeException where a UserError caused flytekit's system error."""
        try:
            return dispatch_execute(*args, **kwargs)
        except FlyteNonRecoverableSystemException as error:
            mistake = error.value  # flytekit may have wrapped our exception in one of its own
            while mistake is not None and not isinstance(mistake, UserError):
                mistake = mistake.__cause__ or mistake.__context__
            if mistake is None:
                raise
            raise FlyteUserRuntimeException(mistake) from mistake

    task.dispatch_execute = dispatch
    return task


def output_file(kind: type[FileType], path: Path) -> FileType:
    """Return a file as a task's output. Locally the file stays; in a pod flytekit uploads it at the task's end.

    Args:
        kind: FlyteFile or PythonPickledFile.
        path: Path of the file.
    """
    return kind(str(path)) if is_in_pod() else kind(str(path), remote_path=False)


def output_folder(path: Path) -> FlyteDirectory:
    """Return a folder as a task's output. Locally the folder stays; in a pod flytekit uploads it at the task's end."""
    return FlyteDirectory(str(path)) if is_in_pod() else FlyteDirectory(str(path), remote_directory=False)
