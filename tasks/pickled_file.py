"""A ``PythonPickledFile`` that may have torch's zip format. Import it from here for an input or output of a task.

With python-magic installed, flytekit looks into local files and accepts only libmagic's MIME type of bare pickles. The
import replaces flytekit's transformer of the type by one that also accepts zip files.
"""

from collections.abc import Sequence

from flytekit.core.type_engine import AsyncTypeTransformer, TypeEngine
from flytekit.types.file import PythonPickledFile
from flytekit.types.file.file import FlyteFilePathTransformer

__all__ = ["PythonPickledFile"]


class PickledFileTransformer(FlyteFilePathTransformer):  # type: ignore[misc]  # which flytekit leaves untyped
    """Flytekit's transformer of PythonPickledFile, which also accepts zip files."""

    def __init__(self) -> None:
        AsyncTypeTransformer.__init__(self, name="PythonPickledFile", t=PythonPickledFile)

    def get_mime_type_from_extension(self, extension: str) -> str | Sequence[str]:
        """Return the MIME types that a local file with this extension may have: flytekit's and zip's."""
        known = super().get_mime_type_from_extension(extension)
        return [known, "application/zip"] if isinstance(known, str) else [*known, "application/zip"]


TypeEngine.register(PickledFileTransformer())
