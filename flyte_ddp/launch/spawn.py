"""Launches ranks on this machine as processes, and watches over them.

This is what ``torch.multiprocessing.spawn`` does, without its import of torch, which the launcher itself does not need
and the ranks need only once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flyte_ddp.launch import fork_server, processes
from flyte_ddp.launch.gang import Member, end, watch
from flyte_ddp.launch.place import Place
from flyte_ddp.launch.stopping import StopRequest

if TYPE_CHECKING:
    from flyte_ddp.job import Job


def launch(job: Job, *, num_ranks: int) -> None:
    """Runs the job on ``num_ranks`` processes.

    Raises:
        UserError: the user's mistake, as the rank that failed first reported it.
        RankError: any other failure of a rank, named by the rank that failed first.
        StoppedError: the process got SIGTERM; for Ctrl-C it is a KeyboardInterrupt.

    """
    gang: list[Member] = []
    with StopRequest() as stop, common_file() as store:
        places = [Place(rank, num_ranks, device=rank, store=store) for rank in range(num_ranks)]
        try:
            if fork_server.POSSIBLE:
                fork_server.start(gang, places)
            else:
                for place in places:
                    processes.start(gang, place)
            for member in gang:
                member.hand_over(job)
            watch(gang, stop, job)
        finally:
            end(gang)


@contextmanager
def common_file() -> Iterator[str]:
    """The path of a file by which ranks of this host find each other: in memory, so it goes with this process.

    Empty where there are no such files; ranks then find each other as on several hosts.
    """
    if not hasattr(os, "memfd_create"):
        yield ""
        return
    file = os.memfd_create("flyte-ddp")
    try:
        yield f"/proc/{os.getpid()}/fd/{file}"
    finally:
        os.close(file)
