"""A rank's agent on its host.

Start the agent by ``python -m flyte_ddp.core.launch.remote.agent``, with a :class:`JoinTicket` on stdin. The agent is a
separate process, because Dask's workers may not have children, and handle no signals where tasks run.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from flyte_ddp.core.errors import UnreachableError
from flyte_ddp.core.launch.remote.sources import unpack_sources
from flyte_ddp.core.launch.supervise.link import RankInfo
from flyte_ddp.core.launch.supervise.rank_handle import RankHandle
from flyte_ddp.core.launch.supervise.rank_starter import open_rank_starter
from flyte_ddp.core.launch.supervise.supervisor import end_ranks
from flyte_ddp.core.machine.process import (
    become_subreaper,
    ignore_signals,
    kill_descendants,
    kill_descendants_and_exit,
)


class RankEndedError(RuntimeError):
    """An agent's rank failed.

    The launcher knows the cause. The engine may start the agent again.
    """


def run_agent(ticket: bytes, sources: bytes = b"", parent_folder: str = "") -> None:
    """Start an agent process on this host, and wait for its end without a limit.

    Args:
        ticket: The bytes of ``JoinTicket.to_stdin()``.
        sources: Source files of the user, from :func:`pack_sources`. Unpickled, so the sender must be trusted. If this
            host's files differ, the agent runs in a temporary folder with a copy.
        parent_folder: The folder in which the temporary folder is made.

    Raises:
        RankEndedError: The agent failed.
    """
    with unpack_sources(sources, parent_folder) as (folder, path), start_agent(ticket, path, folder) as process:
        if process.wait():
            raise RankEndedError("the rank failed")


def start_agent(ticket: bytes, path: Sequence[str] = (), folder: str | None = None) -> subprocess.Popen[bytes]:
    """Start an agent process on this host, and return the process. The end of this process ends the agent.

    Args:
        ticket: The bytes of ``JoinTicket.to_stdin()``.
        path: Folders that the agent has first on ``sys.path``, before the folders of this process.
        folder: The agent's working directory (None: this process's).
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [*path, *sys.path]))}
    command = [sys.executable, "-m", "flyte_ddp.core.launch.remote.agent"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, cwd=folder)
    assert process.stdin is not None
    process.stdin.write(ticket)
    process.stdin.flush()  # stdin stays open, because its end shows the agent that this process has ended
    return process


def agent_start_error(who: str, error: BaseException) -> UnreachableError:
    why = f"{type(error).__name__}: {error}".splitlines()[0]
    return UnreachableError(f"{who} cannot start a rank ({why}); it needs flyte-ddp with the same sources as here")


def main() -> None:
    """Start a rank, and relay its messages until the run is over. Then exit.

    The exit code is 0 if the run is over, also after an error or if no process listens at the launcher's port any more.
    The code is 1 if the launcher cannot be reached, or is lost. Kills the processes that the rank has left. If stdin
    ends meanwhile, kills the rank and exits with 1.
    """
    become_subreaper()  # orphans of the rank become children of this process, which can then kill them
    info = pickle.load(sys.stdin.buffer)
    with open_rank_restarter(info) as start_rank:
        try:
            first = start_rank()  # imports torch while this process gets the work
            from flyte_ddp.core.launch.remote.proxy import join_run

            ticket = pickle.load(sys.stdin.buffer)
            threading.Thread(target=exit_with_parent, name="parent", daemon=True).start()
            code = 0 if join_run(first, ticket, start_rank) else 1
        finally:
            ignore_signals((signal.SIGTERM,))  # by which Elastic may end an agent that is ending
            kill_descendants()  # the rank, too, whose pipes stay open while a descendant of the rank lives
    sys.exit(code)


@contextmanager
def open_rank_restarter(info: RankInfo) -> Iterator[Callable[[], RankHandle]]:
    """Yield a function that starts a new rank. Before, the function kills the rank that it has started last, if any.

    Each call waits up to 10 s for the end of the killed rank. The last rank must have ended before the end of the
    block. On Linux, the end of the block waits up to 10 s for the rank server (the process that forks ranks), and then
    kills the server.
    """
    group: list[RankHandle] = []

    def start_rank() -> RankHandle:
        end_ranks(group)
        group.clear()
        start_ranks(group, [info])
        return group[0]

    with open_rank_starter() as start_ranks:
        yield start_rank


def exit_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    kill_descendants_and_exit()


if __name__ == "__main__":
    main()
