"""What every rank does before and after training, whoever started it."""

import ctypes
import faulthandler
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from flyte_ddp import results
from flyte_ddp.launch.supervise.link import Link
from flyte_ddp.launch.supervise.rank_process import RankInfo
from flyte_ddp.parallel import distributed
from flyte_ddp.parallel.collective_failures import type_failures_of_collectives, waiting_for_ranks
from flyte_ddp.parallel.hang_watch import in_collective, watch_collectives
from flyte_ddp.runs.job import Job
from flyte_ddp.training.train import train

NCCL_GRACE_SECONDS = 60.0
FINISHED = "flyte-ddp finished"  # in the ranks' common store
NO_LIMIT = timedelta(days=365)
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h of glibc
MMAP_MAX, TRIM_THRESHOLD = 65536, 128 * 1024  # what glibc starts with
OfferSaving = Callable[[Callable[[], int]], None]


def run_rank(job: Job, info: RankInfo, offer_saving: OfferSaving, link: Link | None = None) -> None:
    """Run one rank: join the process group, train, and wait for the other ranks. The caller reports what it raises.

    Sets process-wide settings: see :func:`settings_restored`.

    Args:
        link: to the launcher; None for a single rank in the launcher's own process.
    """
    faulthandler.enable()
    torch.set_num_threads(job.hardware.threads)
    if job.hp.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch refuses matrix products on a GPU
    if job.hardware.device_type == "cpu":
        keep_freed_memory()
    else:
        torch.cuda.set_device(info.local_rank)
    if info.world_size > 1:
        assert link is not None
        distributed.set_timeout(job.settings.timeout)
        type_failures_of_collectives()
        with waiting_for_ranks():
            store = meet(job, info, link)
            join_process_group(job, info, store, link)
    with results.delivered_by(results.ResultWriter(job.run_folder).write, info.rank), warnings.catch_warnings():
        train(job, offer_saving)
    if info.world_size > 1:
        # No rank closes its connections while another still needs them. No limit: rank 0 writes what the run leaves.
        if info.rank == 0:
            store.set(FINISHED, "")
        else:
            with waiting_for_ranks():
                store.wait([FINISHED], NO_LIMIT)
        distributed.wait_for_all_ranks()
        dist.destroy_process_group()


def meet(job: Job, info: RankInfo, link: Link) -> Store:
    """Return the ranks' common store: a file on one host, and on several a port that rank 0 binds and reports.

    A TCPStore looks up the names of the hosts that connect, and would wait if a resolver does not answer.
    """
    if info.store:
        file = FileStore(info.store, info.world_size)
        file.set_timeout(distributed.seconds(job.settings.timeout))
        return file
    leader = info.rank == 0
    host, port = ("127.0.0.1", 0) if leader else link.address(job.settings.timeout)
    store = TCPStore(
        host,
        port,
        info.world_size,
        is_master=leader,
        timeout=distributed.seconds(job.settings.timeout),
        wait_for_workers=False,
    )
    if leader:
        link.send("port", port=store.port)
    return store


def join_process_group(job: Job, info: RankInfo, store: Store, link: Link) -> None:
    """Join the process group; on a GPU, also start a thread that reports by the link if this rank waits too long."""
    on_gpu = job.hardware.device_type == "cuda"
    # NCCL ends a process that has waited too long by SIGABRT, and the launcher would take it for the one to blame. So
    # its report goes first.
    limit = job.settings.timeout + (NCCL_GRACE_SECONDS if on_gpu else 0.0)
    if on_gpu:
        watch_collectives(job.settings.timeout, link.report, torch.cuda.Event)
    with in_collective():  # NCCL connects the ranks here, and has no limit for that
        dist.init_process_group(
            job.hardware.backend,
            store=store,
            rank=info.rank,
            world_size=info.world_size,
            timeout=distributed.seconds(limit),
            device_id=torch.device("cuda", info.local_rank) if on_gpu else None,
        )


def keep_freed_memory() -> None:
    """Have glibc keep freed memory instead of returning it to the kernel.

    A step frees what the next one needs again, and page faults are expensive in virtual machines.
    """
    tune_memory(0, 2**31 - 1)


def tune_memory(mappings: int, trim_threshold: int) -> None:
    """Set glibc's M_MMAP_MAX and M_TRIM_THRESHOLD; does nothing with another C library."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_MAX, mappings)
        mallopt(M_TRIM_THRESHOLD, trim_threshold)


@contextmanager
def settings_restored() -> Iterator[None]:
    """Restore at the end what :func:`run_rank` and training set in the whole process.

    That is torch's threads, determinism and random numbers, Python's and NumPy's random numbers, and glibc's settings.
    Only glibc's adaptation of its threshold for mappings does not come back: the first ``mallopt`` ends it.
    """
    threads, cublas = torch.get_num_threads(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    deterministic = torch.are_deterministic_algorithms_enabled()
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        with torch.random.fork_rng([torch.cuda.current_device()] if on_gpu else []):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        torch.set_num_threads(threads)
        if torch.are_deterministic_algorithms_enabled() != deterministic:
            torch.use_deterministic_algorithms(deterministic)
        if cublas is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        tune_memory(MMAP_MAX, TRIM_THRESHOLD)
