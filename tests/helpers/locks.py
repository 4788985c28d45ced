"""Other processes that are at a run in a folder, or would like to be."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RESERVE = """
import pathlib, sys
from flyte_ddp.runs.run_lock import reserve
print(reserve(pathlib.Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process_asks(folder: Path) -> Iterator[bool]:
    """Whether it gets the folder; if so it has it until the end of the block, where it is killed."""
    command = [sys.executable, "-c", RESERVE, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield {"True\n": True, "False\n": False}[process.stdout.readline()]
        finally:
            process.kill()


@contextmanager
def held_by_another_process(folder: Path) -> Iterator[None]:
    """A process that is at a run in the folder, and in the end is killed."""
    with another_process_asks(folder) as got:
        assert got
        yield


def is_free(folder: Path) -> bool:
    """Whether another process may write into the folder."""
    with another_process_asks(folder) as got:
        return got
