"""Replacements for standard streams that are closed when a process starts, as by ``>&-`` or by some schedulers."""

import os
import sys
from pathlib import Path

NAMES = ("stdin", "stdout", "stderr")  # by file number


def open_missing_streams() -> None:
    """Open the null device in place of closed standard streams, also for child processes.

    Also sets ``sys.stdin``, ``sys.stdout`` and ``sys.stderr`` if they are None. Otherwise the next opened file gets a
    stream's number, and printed text goes into this file.
    """
    for number, name in enumerate(NAMES):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("r+"))  # noqa: SIM115 (it stays open)
