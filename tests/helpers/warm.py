"""Rank servers that need not import torch: forks of one process that has, for tests that launch ranks themselves.

The library starts a fresh interpreter for each run, which is what ``make test-all`` tests (``--cold``). Of the two
seconds of a CPU that this takes, ``make test`` has other use.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import connection, forkserver, reduction, resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

from flyte_ddp.launch.supervise import fork_server
from flyte_ddp.launch.supervise.rank_process import quiet_torch
from flyte_ddp.launch.supervise.stopping import SIGNALS

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["flyte_ddp.launch.supervise.rank", "torch._dynamo", "torchvision.models"])
TEMPORARY = tempfile.gettempdir()  # a test's own is too long for the name of a socket
PYTHONPATH = os.environ.get("PYTHONPATH")  # tests that change it want other interpreters
cold = fork_server.starting


def context() -> ForkServerContext:
    """That of forks of the preloaded process, which is started when it is first needed."""
    before, tempfile.tempdir = tempfile.tempdir, TEMPORARY
    forkserver.ensure_running()
    tempfile.tempdir = before
    return FORKS


class File:
    """An open file of this process, for another one."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.number)

    def __setstate__(self, there: Any) -> None:
        self.number = there.detach()


class Warm:
    """As multiprocessing's spawn context, as far as a rank server is started by it."""

    Pipe = staticmethod(connection.Pipe)

    @staticmethod
    def Process(target: Any, args: tuple[Any, ...], name: str) -> BaseProcess:
        here = (os.getcwd(), dict(os.environ), sys.path, [File(1), File(2)])  # noqa: PTH109
        return context().Process(target=serve, args=(here, target, args), name=name)


@contextmanager
def starting() -> Iterator[Any]:
    """In place of the library's own."""
    if os.environ.get("PYTHONPATH") != PYTHONPATH:
        with cold() as context:
            yield context
        return
    sys.stdout.flush()
    sys.stderr.flush()
    resource_tracker.ensure_running()
    yield Warm


def serve(here: tuple[str, Mapping[str, str], list[str], list[File]], target: Any, args: tuple[Any, ...]) -> None:
    """Makes a fork of the preloaded process what a fresh interpreter would be, and calls the target."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    folder, environment, path, streams = here
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    quiet_torch()
    sys.path[:] = path
    for number, file in enumerate(streams, start=1):
        os.dup2(file.number, number)
        os.close(file.number)
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent._pid = os.getppid()  # the preloaded process stands for the launcher, which is none of its children
    target(*args)
