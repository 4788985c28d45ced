"""Pickles that run code."""

import os
from collections.abc import Callable
from pathlib import Path


class MakesFolder:
    """Unpickling creates a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.path),)
