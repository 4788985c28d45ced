"""The decorator of our Flyte tasks, and types of their outputs.

With python-magic installed, flytekit accepts only bare pickles as PythonPickledFile. This module replaces flytekit's
transformer by one that also accepts torch's zip format; import the type from here.
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

__all__ = ["PLATFORM", "PythonPickledFile"]  # others import it from here
FileType = TypeVar("FileType", bound=FlyteFile)


def flyte_task(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a function a Flyte task with these options of flytekit's ``task``.

    It translates errors for Flyte's retries, and counts a UserError for an input as the user's, not the system's.
    """

    def make_task(function: Callable[..., Any]) -> Any:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:  # no decorator made of a context manager: Elastic pickles it
            print_held_outcome()
            with translate_errors_for_flyte():
                return function(*args, **kwargs)

        def dispatch(*args: Any, **kwargs: Any) -> Any:
            with report_user_errors():
                return dispatch_execute(*args, **kwargs)

        made = task(**options)(run)
        # flytekit reports any error before the body as the system's.
        dispatch_execute, made.dispatch_execute = made.dispatch_execute, dispatch
        return made

    return make_task


def output_file(kind: type[FileType], path: Path) -> FileType:
    """Return a file as a task's output: locally it stays, in a pod flytekit uploads it at the task's end."""
    return kind(str(path)) if is_in_pod() else kind(str(path), remote_path=False)


def output_folder(path: Path) -> FlyteDirectory:
    """Return a folder as a task's output: locally it stays, in a pod flytekit uploads it at the task's end."""
    return FlyteDirectory(str(path)) if is_in_pod() else FlyteDirectory(str(path), remote_directory=False)


def download_from_folder(folder: FlyteDirectory, name: str) -> Path | None:
    """Download one file that lies directly in a folder, and return its path; None if the folder has no such file."""
    files = [each for each in FlyteDirectory.listdir(folder) if isinstance(each, FlyteFile)]
    found = [each for each in files if Path(each.remote_source or each.path).name == name]
    return Path(found[0].download()) if found else None


class PickledFileTransformer(FlyteFilePathTransformer):  # type: ignore[misc]  # which flytekit leaves untyped
    """Flytekit's transformer of PythonPickledFile, which also accepts zip files."""

    def __init__(self) -> None:
        AsyncTypeTransformer.__init__(self, name="PythonPickledFile", t=PythonPickledFile)

    def get_mime_type_from_extension(self, extension: str) -> str | Sequence[str]:
        known = super().get_mime_type_from_extension(extension)
        return [known, "application/zip"] if isinstance(known, str) else [*known, "application/zip"]


TypeEngine.register(PickledFileTransformer())
