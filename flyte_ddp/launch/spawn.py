"""Launches ranks on this machine as processes, and supervises them.

This is what ``torch.multiprocessing.spawn`` does, without its import of torch, which the launcher itself does not need
and the ranks need only once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flyte_ddp.launch.supervise import fork_server, processes
from flyte_ddp.launch.supervise.rank_handle import RankHandle
from flyte_ddp.launch.supervise.rank_process import RankInfo
from flyte_ddp.launch.supervise.stopping import stop_requests
from flyte_ddp.launch.supervise.supervisor import end, watch

if TYPE_CHECKING:
    from flyte_ddp.runs.job import Job


def launch(job: Job, *, num_ranks: int) -> None:
    """Run the job on ``num_ranks`` processes; raises what all launchers do (see the package)."""
    group: list[RankHandle] = []
    with stop_requests() as stop, common_file() as store:
        infos = [RankInfo(rank, num_ranks, local_rank=rank, store=store) for rank in range(num_ranks)]
        try:
            if fork_server.POSSIBLE:
                fork_server.start(group, infos, with_torch=job.hardware.device_type in fork_server.TRIED_ON)
            else:
                for info in infos:
                    processes.start(group, info)
            for handle in group:
                handle.hand_over(job)
            watch(group, stop, job)
        finally:
            end(group)


@contextmanager
def common_file() -> Iterator[str]:
    """Yield the path of a file by which ranks of this host find each other: in memory, so it goes with this process.

    Empty on systems without such files, where ranks find each other as on several hosts.
    """
    if not hasattr(os, "memfd_create"):
        yield ""
        return
    file = os.memfd_create("flyte-ddp")
    try:
        yield f"/proc/{os.getpid()}/fd/{file}"
    finally:
        os.close(file)
