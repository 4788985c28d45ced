"""Standard streams of a process that was started without them, as by ``>&-`` or by some schedulers."""

import os
import sys
from pathlib import Path

NAMES = ("stdin", "stdout", "stderr")  # by the numbers of their files


def open_missing_streams() -> None:
    """Open the null device in place of standard streams that are closed, for this process and for those it starts.

    Otherwise the next file that is opened gets a stream's number, and what is printed goes into that file.
    """
    for number, name in enumerate(NAMES):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("r+"))  # noqa: SIM115 (it stays open)
