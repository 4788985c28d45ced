"""Flyte as the platform that runs tasks, through flytekit: one implementation of flyte_ddp.pods.platforms.Platform."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from flytekit import Deck, FlyteContextManager, current_context
from flytekit.configuration import LocalConfig
from flytekit.core.base_task import PythonTask
from flytekit.exceptions.system import FlyteNonRecoverableSystemException
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.errors import UserError
from flyte_ddp.pods import retries
from flyte_ddp.pods.elastic import POD_FOLDER

AnyTask = TypeVar("AnyTask", bound=PythonTask)
FileType = TypeVar("FileType", bound=FlyteFile)


class Page(Deck):  # type: ignore[misc]  # which flytekit leaves untyped
    """A deck that can be replaced."""

    page = ""

    @property
    def html(self) -> str:
        """Return the newest page."""
        return self.page


class Flyte:
    """What flytekit says of the task that runs now; see :class:`flyte_ddp.pods.platforms.Platform`."""

    def is_local(self) -> bool:
        """Return whether ``pyflyte run`` without ``--remote`` runs the task."""
        if POD_FOLDER in os.environ:  # Flyte's context does not say it in the workers that Elastic starts
            return not os.environ[POD_FOLDER]
        state = FlyteContextManager.current_context().execution_state
        return state is None or state.is_local_execution()

    def pod_folder(self) -> Path:
        """Return flytekit's working directory of the task, also in Elastic's workers, which have others."""
        return Path(os.environ.get(POD_FOLDER) or current_context().working_directory)

    def disk_limit(self) -> str:
        """Return the task's limit of ephemeral storage; empty in pods of engines, which are made by others."""
        module, _, name = os.environ.get("FLYTE_INTERNAL_TASK_NAME", "").rpartition(".")
        task = getattr(sys.modules.get(module), name, None)
        return "" if task is None or task.task_type != "python-task" else str(task.resources.limits.ephemeral_storage)

    def is_retraining_requested(self) -> bool:
        """Return whether ``pyflyte run`` has ``--overwrite-cache``, or Flyte's local cache is off."""
        cache = LocalConfig.auto()
        return bool(cache.cache_overwrite or not cache.cache_enabled)

    def output_address(self) -> str:
        """Return the prefix of this attempt's raw outputs."""
        return str(FlyteContextManager.current_context().file_access.raw_output_prefix)

    def read_secret(self, group: str, key: str) -> str | None:
        """Return a secret that the task has requested; None if there is none in the pod."""
        try:
            return str(current_context().secrets.get(group, key))
        except ValueError:
            return None

    def upload_folder(self, folder: Path, address: str) -> None:
        """Upload a folder through flytekit's file access."""
        FlyteContextManager.current_context().file_access.put_data(str(folder), address, is_multipart=True)

    def publish_page(self, title: str, html: str) -> None:
        """Replace this task's deck of that title, or add it, and upload all of its decks."""
        decks = FlyteContextManager.current_context().user_space_params.decks
        deck = next((deck for deck in decks if isinstance(deck, Page) and deck.name == title), None) or Page(title)
        deck.page = html
        Deck.publish()

    def retryable_error(self, message: str) -> Exception:
        """Return the one exception after which Flyte uses a task's retries."""
        return FlyteRecoverableException(message)


PLATFORM = Flyte()
translate_errors_for_flyte = partial(retries.translate_errors, PLATFORM)  # Flyte counts any other exception as final
sync_checkpoints = partial(retries.sync_checkpoints, PLATFORM)


def report_refused_inputs(task: AnyTask) -> AnyTask:
    """Replace a task's ``dispatch_execute``, so that inputs which it refuses are the user's mistake; return the task.

    flytekit counts errors before the task's body as the system's. Goes above ``@task``.
    """
    dispatch_execute = task.dispatch_execute

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        try:
            return dispatch_execute(*args, **kwargs)
        except FlyteNonRecoverableSystemException as error:
            mistake = error.value  # which flytekit may have wrapped in one of its own
            while mistake is not None and not isinstance(mistake, UserError):
                mistake = mistake.__cause__ or mistake.__context__
            if mistake is None:
                raise
            raise FlyteUserRuntimeException(mistake) from mistake

    task.dispatch_execute = dispatch
    return task


def output_file(kind: type[FileType], path: Path) -> FileType:
    """Return an output file: the path itself locally, so that it stays in the run folder; uploaded on a cluster."""
    return kind(str(path), remote_path=False) if PLATFORM.is_local() else kind(str(path))


def output_folder(path: Path) -> FlyteDirectory:
    """Return an output folder, likewise."""
    return FlyteDirectory(str(path), remote_directory=False) if PLATFORM.is_local() else FlyteDirectory(str(path))
