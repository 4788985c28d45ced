"""Launches ranks on this machine as processes, and watches over them.

This is what ``torch.multiprocessing.spawn`` does, without its import of torch, which the launcher itself does not need
and the ranks need only once.
"""

from __future__ import annotations

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
    places = [Place(rank, num_ranks, device=rank) for rank in range(num_ranks)]
    gang: list[Member] = []
    with StopRequest() as stop:
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
