"""A rank's agent on its host: ``python -m flyte_ddp.launch.remote.agent``, with a :class:`JoinTicket` on its stdin.

It is a process of its own: Dask's workers may not have children, and handle no signals where they run tasks.
"""

import os
import pickle
import subprocess
import sys
import threading

from flyte_ddp.errors import UnreachableError
from flyte_ddp.launch.remote.sources import unpack_sources
from flyte_ddp.launch.supervise.fork_server import open_starter
from flyte_ddp.launch.supervise.rank_handle import RankHandle
from flyte_ddp.launch.supervise.supervisor import end_ranks
from flyte_ddp.machine.process import become_subreaper, kill_descendants


class RankEndedError(RuntimeError):
    """An agent's rank failed. The launcher knows the cause; the engine may start the agent again."""


def run_agent(stdin: bytes, sources: bytes = b"", parent_folder: str = "") -> None:
    """Start an agent process on this host, and wait for its end; RankEndedError if it fails.

    ``stdin`` is a ticket's ``to_stdin()``. ``sources`` (:func:`pack_sources`) are unpacked in ``parent_folder``.
    """
    with unpack_sources(sources, parent_folder) as (folder, path):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [*path, *sys.path]))}
        command = [sys.executable, "-m", "flyte_ddp.launch.remote.agent"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, cwd=folder) as process:
            assert process.stdin is not None
            process.stdin.write(stdin)
            process.stdin.flush()  # stdin stays open: the agent takes its end for the end of this process
            if process.wait():
                raise RankEndedError("the rank failed")


def agent_start_error(who: str, error: BaseException) -> UnreachableError:
    why = f"{type(error).__name__}: {error}".splitlines()[0]
    return UnreachableError(f"{who} cannot start a rank ({why}); it needs flyte-ddp as it is here")


def main() -> None:
    """Start one rank and relay its messages; exit with 1 if the launcher is lost before the run is over, else 0."""
    become_subreaper()  # orphans of the rank become children of this process, which can then kill them
    info = pickle.load(sys.stdin.buffer)
    group: list[RankHandle] = []

    def start_rank() -> RankHandle:
        end_ranks(group)
        group.clear()
        start_ranks(group, [info])
        return group[0]

    with open_starter() as start_ranks:
        try:
            first = start_rank()  # imports torch while this process gets the work
            from flyte_ddp.launch.remote.proxy import proxy_rank

            ticket = pickle.load(sys.stdin.buffer)
            threading.Thread(target=exit_with_parent, name="parent", daemon=True).start()
            code = 0 if proxy_rank(first, ticket, start_rank) else 1
        finally:
            kill_descendants()  # the rank, too: its pipes stay open as long as one of its descendants lives
    sys.exit(code)


def exit_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    kill_descendants()
    os._exit(1)


if __name__ == "__main__":
    main()
