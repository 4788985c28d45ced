"""Pickles that run code."""

import os
from collections.abc import Callable
from pathlib import Path


class MakesFolder:
    """Unpickles to a call that leaves a folder behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.path),)
