"""What every rank does first and last, whoever started it."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from flyte_ddp import distributed
from flyte_ddp.job import Job
from flyte_ddp.launch.link import Link
from flyte_ddp.train import train

NCCL_GRACE_SECONDS = 60.0
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h of glibc


@dataclass(frozen=True)
class Place:
    """Which of the ranks this one is."""

    rank: int
    world_size: int
    local_rank: int


def run_rank(job: Job, place: Place, link: Link) -> None:
    """Runs one rank of a gang, from the process group to its end; what it raises is the caller's to report."""
    faulthandler.enable()
    torch.set_num_threads(job.hardware.threads)
    if job.hp.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch refuses matrix products on a GPU
    if job.hardware.device_type == "cpu":
        keep_freed_memory()
    else:
        torch.cuda.set_device(place.local_rank)
    if place.world_size > 1:
        join_process_group(job, place, meet(job, place, link))
    train(job, link.offer_saving)
    if place.world_size > 1:
        dist.barrier()  # no rank closes its connections while another still needs them
        dist.destroy_process_group()


def meet(job: Job, place: Place, link: Link) -> Store:
    """The ranks' common store: rank 0 binds a free port and says which, so that no two runs are in each other's way."""
    host, leader = "127.0.0.1", place.rank == 0
    store = TCPStore(
        host,
        0 if leader else link.port(job.settings.timeout),
        place.world_size,
        is_master=leader,
        timeout=distributed.seconds(job.settings.timeout),
        wait_for_workers=False,
    )
    if leader:
        link.send("port", port=store.port)
    return store


def join_process_group(job: Job, place: Place, store: Store) -> None:
    """Joins the other ranks."""
    distributed.set_timeout(job.settings.timeout)
    on_gpu = job.hardware.device_type == "cuda"
    # NCCL ends a process that has waited too long by SIGABRT. The rank itself, which can say what it waited for, goes
    # first: see distributed.wait_for.
    limit = job.settings.timeout + (NCCL_GRACE_SECONDS if on_gpu else 0.0)
    dist.init_process_group(
        job.hardware.backend,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=distributed.seconds(limit),
        device_id=torch.device("cuda", place.local_rank) if on_gpu else None,
    )


def keep_freed_memory() -> None:
    """Has glibc keep what is freed instead of giving it back to the kernel, which would hand it out anew page by page.

    A step frees what the next one needs again, and page faults are dear in virtual machines.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_MMAP_MAX, 0)
            mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
