"""The decorator of this project's Flyte tasks, and types of task outputs.

If python-magic is installed, flytekit accepts only bare pickles as PythonPickledFile. This module registers a
transformer that also accepts torch's zip format. Import PythonPickledFile from this module.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from flytekit import task
from flytekit.core.type_engine import AsyncTypeTransformer, TypeEngine
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile
from flytekit.types.file.file import FlyteFilePathTransformer

from flyte_ddp.pods.outcomes import print_held_outcome
from flyte_ddp.pods.platforms import is_in_pod
from flytekitplugins.ddp.flyte import PLATFORM, report_user_errors, translate_errors_for_flyte

__all__ = ["PLATFORM", "PythonPickledFile"]  # other modules import both from here
FileType = TypeVar("FileType", bound=FlyteFile)


def flyte_task(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a function a Flyte task with these options of flytekit's ``task``.

    The task translates errors for Flyte's retries. A UserError for an input counts as the user's error, not as a system
    error.
    """

    def make_task(function: Callable[..., Any]) -> Any:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:  # a plain function, because Elastic pickles it
            print_held_outcome()
            with translate_errors_for_flyte():
                return function(*args, **kwargs)

        def dispatch(*args: Any, **kwargs: Any) -> Any:
            with report_user_errors():
                return dispatch_execute(*args, **kwargs)

        made = task(**options)(run)
        # flytekit reports any error before the body as a system error.
        dispatch_execute, made.dispatch_execute = made.dispatch_execute, dispatch
        return made

    return make_task


def output_file(kind: type[FileType], path: Path) -> FileType:
    """Return a file as a task's output.

    Locally the file stays in place. In a pod, flytekit uploads the file when the task ends.
    """
    return kind(str(path)) if is_in_pod() else kind(str(path), remote_path=False)


def output_folder(path: Path) -> FlyteDirectory:
    """Return a folder as a task's output.

    Locally the folder stays in place. In a pod, flytekit uploads the folder when the task ends.
    """
    return FlyteDirectory(str(path)) if is_in_pod() else FlyteDirectory(str(path), remote_directory=False)


def download_from_folder(folder: FlyteDirectory, name: str) -> Path | None:
    """Download the file ``name`` directly in a folder, and return the local path.

    Returns None if the file does not exist.
    """
    files = [each for each in FlyteDirectory.listdir(folder) if isinstance(each, FlyteFile)]
    found = [each for each in files if Path(each.remote_source or each.path).name == name]
    return Path(found[0].download()) if found else None


class PickledFileTransformer(FlyteFilePathTransformer):  # type: ignore[misc]  # which flytekit leaves untyped
    """Flytekit's transformer of PythonPickledFile, extended to accept zip files."""

    def __init__(self) -> None:
        AsyncTypeTransformer.__init__(self, name="PythonPickledFile", t=PythonPickledFile)

    def get_mime_type_from_extension(self, extension: str) -> str | Sequence[str]:
        known = super().get_mime_type_from_extension(extension)
        return [known, "application/zip"] if isinstance(known, str) else [*known, "application/zip"]


TypeEngine.register(PickledFileTransformer())
