"""Has Flyte take torch's zip format for a ``PythonPickledFile``: import it where such a file is an input or an output.

Where python-magic is installed flytekit looks into local files, and what it knows of pickles is the one MIME type
that libmagic has for bare ones. This is flytekit's own transformer of the type, with one more MIME type that it takes;
what Flyte stores and shows of the file is as before.
"""

from collections.abc import Sequence

from flytekit.core.type_engine import AsyncTypeTransformer, TypeEngine
from flytekit.types.file import PythonPickledFile
from flytekit.types.file.file import FlyteFilePathTransformer

__all__ = ["PythonPickledFile"]


class PickledFileTransformer(FlyteFilePathTransformer):  # type: ignore[misc]  # which flytekit leaves untyped
    """Flytekit's transformer of the type, which also takes a zip file."""

    def __init__(self) -> None:
        AsyncTypeTransformer.__init__(self, name="PythonPickledFile", t=PythonPickledFile)

    def get_mime_type_from_extension(self, extension: str) -> str | Sequence[str]:
        """Return the MIME types that a file of the type may have."""
        known = super().get_mime_type_from_extension(extension)
        return [known, "application/zip"] if isinstance(known, str) else [*known, "application/zip"]


TypeEngine.register(PickledFileTransformer())
