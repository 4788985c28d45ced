"""Models that start processes, named in tests as ``offspring_models:...``. The processes ignore SIGTERM."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import faults
from torch import nn

DEAF = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(int(sys.argv[1]), str(os.getpid()).encode())
time.sleep(100_000)
"""
CHILDREN: list[subprocess.Popen[bytes]] = []


def parental(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """Return a model, and start a fork (like torch's workers), a command in a new session, and a daemon."""
    started(daemon)
    return without_daemon(num_classes, input_shape)


def without_daemon(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    started(fork)
    started(command)
    return faults.model(num_classes, input_shape)


def started(start: Callable[[int], None]) -> None:
    """Start a process. Create a file named by the process id once the process ignores SIGTERM."""
    reader, writer = os.pipe()
    start(writer)
    os.close(writer)
    folder = Path(os.environ["TMPDIR"], "started")
    folder.mkdir(exist_ok=True)
    (folder / os.read(reader, 20).decode()).touch()
    os.close(reader)


def daemon(writer: int) -> None:
    middle = os.fork()
    if middle == 0:
        os.setsid()
        fork(writer)
        os._exit(0)
    os.waitpid(middle, 0)


def fork(writer: int) -> None:
    if os.fork() == 0:
        deaf(writer)


def command(writer: int) -> None:
    words = [sys.executable, "-c", DEAF, str(writer)]
    CHILDREN.append(subprocess.Popen(words, pass_fds=[writer], start_new_session=True))


def deaf(writer: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(writer, str(os.getpid()).encode())
    while True:
        time.sleep(1000)


def state(pid: int) -> str:
    """Return the letter of a process's state, as in ``ps``, or "" if the process does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
