"""Launches ranks as processes of this machine, forked on Linux by ``rank_starter.py``, and spawned on other systems.

Each rank begins in rank_process.start_rank. ``torch.multiprocessing.spawn`` would import torch once in each rank, and
also in this process, which does not need torch.
"""

import os
from contextlib import ExitStack
from dataclasses import replace

from flyte_ddp.core.launch.supervise.link import RankInfo
from flyte_ddp.core.launch.supervise.network import LOOPBACK
from flyte_ddp.core.launch.supervise.rank_handle import RankHandle
from flyte_ddp.core.launch.supervise.rank_starter import open_rank_starter
from flyte_ddp.core.launch.supervise.restarts import run_with_restarts
from flyte_ddp.core.launch.supervise.stopping import catch_stop_signals
from flyte_ddp.core.launch.supervise.supervisor import end_ranks, supervise_ranks
from flyte_ddp.core.machine.resources import detect_world
from flyte_ddp.core.runs.work import Work


def launch(work: Work) -> None:
    """Run the work in processes of this machine, one for each rank, and wait until the ranks end.

    After a failure kills all ranks, and restarts the ranks in place if a restart may help. Raises the errors of all
    launchers (:mod:`flyte_ddp.core.launch`).
    """
    work = work.choose_world(detect_world)
    num_ranks = work.world.num_ranks
    world = replace(work.world, hosts=(LOOPBACK,) * num_ranks)
    work = replace(work, world=world, host_function="")  # this host has the data

    def start_and_supervise(work: Work) -> None:
        """Start all ranks and wait until they complete. After an error, kill the ranks."""
        group: list[RankHandle] = []
        with ExitStack() as at_end:
            store = ""  # without files in memory, ranks find each other as on several hosts
            if hasattr(os, "memfd_create"):
                file = os.memfd_create("flyte-ddp")  # vanishes when this process ends for any reason
                at_end.callback(os.close, file)
                store = f"/proc/{os.getpid()}/fd/{file}"
            at_end.callback(end_ranks, group)
            of_all = work.function, work.world.device_type, store
            start_ranks(group, [RankInfo(rank, num_ranks, rank, *of_all) for rank in range(num_ranks)])
            for handle in group:
                handle.queue_work(work)  # sent in supervise_ranks
            supervise_ranks(group, stop, work)

    with catch_stop_signals() as stop, open_rank_starter() as start_ranks:
        run_with_restarts(work, start_and_supervise, stop)
