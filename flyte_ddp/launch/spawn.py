"""Launches ranks on this machine as processes, and supervises them.

``torch.multiprocessing.spawn`` would import torch in this process, which does not need it, and once in each rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flyte_ddp.launch.supervise import fork_server, processes
from flyte_ddp.launch.supervise.rank_handle import RankHandle
from flyte_ddp.launch.supervise.rank_process import RankInfo
from flyte_ddp.launch.supervise.stopping import catch_stop_signals
from flyte_ddp.launch.supervise.supervisor import end_ranks, supervise_ranks

if TYPE_CHECKING:
    from flyte_ddp.runs.job import Job


def launch(job: Job, *, num_ranks: int) -> None:
    """Run the job in ``num_ranks`` processes of this machine, and wait for their end; kill them if one fails.

    On Linux a server process forks the ranks, else each is spawned. Raises the error of the rank that failed first.
    """
    group: list[RankHandle] = []
    with catch_stop_signals() as stop, open_memory_file() as store:
        infos = [RankInfo(rank, num_ranks, local_rank=rank, store=store) for rank in range(num_ranks)]
        try:
            if fork_server.POSSIBLE:
                fork_server.start_ranks(group, infos, with_torch=job.hardware.device_type in fork_server.TRIED_ON)
            else:
                for info in infos:
                    processes.start_process(group, info)
            for handle in group:
                handle.send_job(job)
            supervise_ranks(group, stop, job)
        finally:
            end_ranks(group)


@contextmanager
def open_memory_file() -> Iterator[str]:
    """Yield the path of a new file in memory for the ranks' common store; the file ends with the block or this process.

    Yields an empty string on systems without such files; ranks then find each other as on several hosts.
    """
    if not hasattr(os, "memfd_create"):
        yield ""
        return
    file = os.memfd_create("flyte-ddp")
    try:
        yield f"/proc/{os.getpid()}/fd/{file}"
    finally:
        os.close(file)
