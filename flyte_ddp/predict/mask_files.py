"""Predicted masks as PNG files in a folder beside a table."""

import shutil
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from flyte_ddp.report.page import color_table

PALETTE = 256  # colours that a PNG with a palette can have


class MaskFolder(AbstractContextManager["MaskFolder"]):
    """Writes masks into a new folder, which replaces the folder at ``path`` when the block ends without an error.

    Without a mask leaves ``path`` as it is. Raises OSError if a file cannot be written.
    """

    def __init__(self, path: Path, classes: int) -> None:
        self.path, self.classes = path, classes
        self._new: Path | None = None
        self._names: set[str] = set()

    def write_mask(self, name: str, mask: NDArray[Any]) -> str:
        """Write a mask [H, W] of class numbers as a PNG, and return its path relative to the folder of ``path``.

        ``name`` may have folders; a number comes behind a name that is taken.
        """
        if self._new is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._new = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", dir=self.path.parent))
            self._new.chmod(0o755)  # as other new folders; mkdtemp's are private
        name = "/".join(part for part in PurePosixPath(name).parts if part not in ("/", "..")) or "mask"
        chosen, number = name, 1
        while chosen in self._names:
            number += 1
            chosen = f"{name}-{number}"
        self._names.add(chosen)
        file = self._new / f"{chosen}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        if self.classes > PALETTE:
            image = Image.fromarray(mask.astype(np.uint16))
        else:
            image = Image.fromarray(mask.astype(np.uint8))
            image.putpalette(color_table(self.classes).tobytes())
        image.save(file, format="PNG")
        return f"{self.path.name}/{chosen}.png"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._new is None:
            return
        if kind is None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._new.rename(self.path)
        else:
            shutil.rmtree(self._new, ignore_errors=True)
