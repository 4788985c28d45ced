"""Stands for a rank on its host: ``python -m flyte_ddp.launch.agent``, with an :class:`Invitation` on its input.

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

from flyte_ddp.launch.gang import Member, end
from flyte_ddp.launch.offspring import end_offspring, take_in_orphans
from flyte_ddp.launch.processes import start
from flyte_ddp.launch.sources import unpacked

if TYPE_CHECKING:
    from flyte_ddp.launch.remote import Invitation


class RankEndedError(RuntimeError):
    """An agent's rank did not come to its end. The launcher knows why; the engine may try again."""


def run(invitation: Invitation) -> None:
    """Starts an agent and waits for its end. What an engine calls where a rank is to be.

    Raises:
        RankEndedError: it was not a good one.
    """
    start_agent(in_words(invitation))


def run_with(sources: bytes, words: bytes, below: str) -> None:
    """The same on a host that need not have this library, where this function comes by value.

    Args:
        sources: from :func:`flyte_ddp.launch.sources.packed`.
        words: from :func:`in_words`.
        below: a folder of that host's, for the sources.
    """
    with unpacked(sources, below) as (folder, places):
        start_agent(words, folder, places)


def in_words(invitation: Invitation) -> bytes:
    """What an agent gets on its input; first comes the place, with which it starts its rank."""
    return pickle.dumps(invitation.place) + pickle.dumps(invitation)


def start_agent(words: bytes, folder: str | None = None, places: Sequence[str] = ()) -> None:
    """See :func:`run`.

    Args:
        folder: the agent's working directory, where Python looks for modules first; None: this process's.
        places: where it looks for them then, before it does so where this process does.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [*places, *sys.path]))}
    command = [sys.executable, "-m", "flyte_ddp.launch.agent"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, cwd=folder) as process:
        assert process.stdin is not None
        process.stdin.write(words)
        process.stdin.flush()  # and it stays open: its end is the end of this process
        if process.wait():
            raise RankEndedError("the rank did not come to its end")


def main() -> None:
    """The process's first function."""
    take_in_orphans()  # of its rank, so that it can end all that the rank has started
    place = pickle.load(sys.stdin.buffer)
    gang: list[Member] = []
    try:
        start(gang, place)  # first of all: it takes its time to import torch, in which this process gets its job
        from flyte_ddp.launch.standing import stand_for

        invitation = pickle.load(sys.stdin.buffer)
        threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
        code = 0 if stand_for(gang[0], invitation) else 1
    finally:
        end(gang)
        end_offspring()
    sys.exit(code)


def end_with_parent() -> None:
    """Ends this process, its rank, and what that has started, when the one that started it has ended."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    end_offspring()
    os._exit(1)


if __name__ == "__main__":
    main()
