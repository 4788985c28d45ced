"""A rank's agent on its host: ``python -m flyte_ddp.launch.remote.agent``, with a :class:`JoinTicket` on its input.

A process of its own, so that the rank that it starts has a parent whose signals and children are nobody else's: Dask's
workers must not have children, and run tasks off their main threads. It ends with whoever started it, and the rank
with it.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flyte_ddp.errors import UnreachableError
from flyte_ddp.launch.remote.sources import unpacked
from flyte_ddp.launch.supervise.processes import start
from flyte_ddp.process import become_subreaper, kill_descendants

if TYPE_CHECKING:
    from flyte_ddp.launch.remote.joining import JoinTicket
    from flyte_ddp.launch.supervise.rank_handle import RankHandle


class RankEndedError(RuntimeError):
    """An agent's rank failed. The launcher knows why; the engine may try again."""


def cannot_start(who: str, error: BaseException) -> UnreachableError:
    """Return the error for an agent that an engine could not start."""
    why = f"{type(error).__name__}: {error}".splitlines()[0]
    return UnreachableError(f"{who} cannot start a rank ({why}); it needs flyte-ddp as it is here")


def run(ticket: JoinTicket) -> None:
    """Start an agent and wait for its end: what an engine calls where a rank is to be."""
    start_agent(input_of(ticket))


def run_with(sources: bytes, stdin: bytes, below: str) -> None:
    """Do the same on a host that need not have this library, where this function comes by value.

    Puts the sources, which are :func:`packed`, into a folder of its own below that one.
    """
    with unpacked(sources, below) as (folder, path):
        start_agent(stdin, folder, path)


def input_of(ticket: JoinTicket) -> bytes:
    """Return an agent's standard input: first what it starts its rank with, then the ticket."""
    return pickle.dumps(ticket.info) + pickle.dumps(ticket)


def start_agent(stdin: bytes, folder: str | None = None, path: Sequence[str] = ()) -> None:
    """See :func:`run`. Python looks for modules in the agent's working directory, then in ``path``, then as here."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [*path, *sys.path]))}
    command = [sys.executable, "-m", "flyte_ddp.launch.remote.agent"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, cwd=folder) as process:
        assert process.stdin is not None
        process.stdin.write(stdin)
        process.stdin.flush()  # and it stays open: its end is the end of this process
        if process.wait():
            raise RankEndedError("the rank failed")


def main() -> None:
    """Start the rank, and be its proxy until its end; the process's first function."""
    become_subreaper()  # so that it can end all that its rank has started
    info = pickle.load(sys.stdin.buffer)
    group: list[RankHandle] = []
    try:
        start(group, info)  # first of all: while it imports torch, this process gets the job
        from flyte_ddp.launch.remote.proxy import proxy_rank

        ticket = pickle.load(sys.stdin.buffer)
        threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
        code = 0 if proxy_rank(group[0], ticket) else 1
    finally:
        kill_descendants()  # the rank, too; to wait for it alone would be to wait for what it has left behind
    sys.exit(code)


def end_with_parent() -> None:
    """End this process, its rank, and what that has started, when the one that started it has ended."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    kill_descendants()
    os._exit(1)


if __name__ == "__main__":
    main()
