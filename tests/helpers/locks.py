"""Other processes that hold, or ask for, the lock of a run folder."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOLD = """
import pathlib, sys
from flyte_ddp.errors import UserError
from flyte_ddp.runs.run_folder import hold_run_folder
try:
    with hold_run_folder(pathlib.Path(sys.argv[1])):
        print(True, flush=True)
        sys.stdin.read()
except UserError:
    print(False, flush=True)
"""


@contextmanager
def another_process_asks(folder: Path) -> Iterator[bool]:
    """Yield whether another process gets the folder's lock; kill that process at the end of the block."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield {"True\n": True, "False\n": False}[process.stdout.readline()]
        finally:
            process.kill()


@contextmanager
def held_by_another_process(folder: Path) -> Iterator[None]:
    """Let another process hold the folder's lock during the block."""
    with another_process_asks(folder) as got:
        assert got
        yield


def is_free(folder: Path) -> bool:
    """Return whether another process can get the folder's lock."""
    with another_process_asks(folder) as got:
        return got
