"""Launches ranks of this machine, forked on Linux, spawned elsewhere; each begins in rank_process.start_rank.

``torch.multiprocessing.spawn`` would import torch in this process, which does not need it, and once in each rank.
"""

import os
from contextlib import ExitStack
from dataclasses import replace

from flyte_ddp.launch.supervise import fork_server, rank_handle
from flyte_ddp.launch.supervise.link import RankInfo
from flyte_ddp.launch.supervise.network import LOOPBACK
from flyte_ddp.launch.supervise.rank_handle import RankHandle
from flyte_ddp.launch.supervise.stopping import catch_stop_signals
from flyte_ddp.launch.supervise.supervisor import end_ranks, supervise_ranks
from flyte_ddp.machine.resources import detect_world
from flyte_ddp.runs.work import Work


def launch(work: Work) -> None:
    """Do the work in processes of this machine, one for each rank; raise the launchers' errors."""
    work = work.choose_world(detect_world)
    num_ranks = work.world.num_ranks
    work = replace(work, world=replace(work.world, hosts=(LOOPBACK,) * num_ranks), on_host="")  # this host has the data
    group: list[RankHandle] = []
    with catch_stop_signals() as stop, ExitStack() as at_end:
        store = ""  # where there are no files in memory, ranks find each other as on several hosts
        if hasattr(os, "memfd_create"):
            file = os.memfd_create("flyte-ddp")  # ends with this process, however that ends
            at_end.callback(os.close, file)
            store = f"/proc/{os.getpid()}/fd/{file}"
        at_end.callback(end_ranks, group)
        infos = [RankInfo(rank, num_ranks, rank, work.function, store) for rank in range(num_ranks)]
        if fork_server.POSSIBLE:
            fork_server.start_ranks(group, infos, with_torch=work.world.device_type in fork_server.TRIED_ON)
        else:
            for info in infos:
                rank_handle.start_process(group, info)
        for handle in group:
            handle.send_work(work)  # leaves in supervise_ranks, when the rank says that it is ready
        supervise_ranks(group, stop, work.settings)
