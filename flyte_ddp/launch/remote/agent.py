"""A rank's agent on its host: ``python -m flyte_ddp.launch.remote.agent``, with a :class:`JoinTicket` on its stdin.

The agent is a process of its own, because Dask's workers may not have children, and handle no signals where they run
tasks. It ends when the process that started it ends, and the rank ends with the agent.
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
from flyte_ddp.launch.remote.sources import unpack_sources
from flyte_ddp.launch.supervise.processes import start_process
from flyte_ddp.process import become_subreaper, kill_descendants

if TYPE_CHECKING:
    from flyte_ddp.launch.remote.joining import JoinTicket
    from flyte_ddp.launch.supervise.rank_handle import RankHandle


class RankEndedError(RuntimeError):
    """An agent's rank failed. The launcher knows the cause; the engine may start the agent again."""


def start_error(who: str, error: BaseException) -> UnreachableError:
    """Return the error for an agent that an engine could not start.

    Args:
        who: where the engine tried, such as "a Dask worker".
        error: the engine's exception.
    """
    why = f"{type(error).__name__}: {error}".splitlines()[0]
    return UnreachableError(f"{who} cannot start a rank ({why}); it needs flyte-ddp as it is here")


def run_agent(ticket: JoinTicket) -> None:
    """Start an agent process here and wait for its end, without a limit. An engine calls this on the rank's host.

    Raises:
        RankEndedError: the agent's rank failed.
    """
    start_agent(agent_stdin(ticket))


def run_agent_with_sources(sources: bytes, stdin: bytes, below: str) -> None:
    """Start an agent with these sources and wait for its end, on a host that need not have this library.

    Args:
        sources: of :func:`pack_sources`.
        stdin: of :func:`agent_stdin`.
        below: folder in which a temporary folder with the sources is made, unless the host has the same files.

    Raises:
        RankEndedError: the agent's rank failed.
    """
    with unpack_sources(sources, below) as (folder, path):
        start_agent(stdin, folder, path)


def agent_stdin(ticket: JoinTicket) -> bytes:
    """Return an agent's stdin: the pickled RankInfo, with which it starts its rank, and the pickled ticket."""
    return pickle.dumps(ticket.info) + pickle.dumps(ticket)


def start_agent(stdin: bytes, folder: str | None = None, path: Sequence[str] = ()) -> None:
    """Start an agent process and wait for its end, without a limit.

    Args:
        stdin: of :func:`agent_stdin`.
        folder: the agent's working directory; None: this process's.
        path: folders in which the agent looks for modules, before those of this process's ``sys.path``.

    Raises:
        RankEndedError: the agent's rank failed.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [*path, *sys.path]))}
    command = [sys.executable, "-m", "flyte_ddp.launch.remote.agent"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, cwd=folder) as process:
        assert process.stdin is not None
        process.stdin.write(stdin)
        process.stdin.flush()  # stdin stays open: the agent takes its end for the end of this process
        if process.wait():
            raise RankEndedError("the rank failed")


def main() -> None:
    """Run an agent: start one rank, relay its messages to and from the launcher, then kill all descendants and exit.

    Reads the rank's facts and the ticket of the launcher from stdin, as pickles. Exits with 1 if the launcher is gone
    without a word, else with 0. When stdin ends, a thread kills all descendants and exits with 1.
    """
    become_subreaper()  # orphans of the rank become children of this process, which can then kill them
    info = pickle.load(sys.stdin.buffer)
    group: list[RankHandle] = []
    try:
        start_process(group, info)  # first: the rank imports torch while this process gets the job
        from flyte_ddp.launch.remote.proxy import proxy_rank

        ticket = pickle.load(sys.stdin.buffer)
        threading.Thread(target=exit_with_parent, name="parent", daemon=True).start()
        code = 0 if proxy_rank(group[0], ticket) else 1
    finally:
        kill_descendants()  # the rank, too: its pipes stay open as long as one of its descendants lives
    sys.exit(code)


def exit_with_parent() -> None:
    """Wait for the end of stdin, which is the end of the starting process; kill all descendants, and exit with 1."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    kill_descendants()
    os._exit(1)


if __name__ == "__main__":
    main()
