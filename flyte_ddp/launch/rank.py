"""What every rank does first and last, whoever started it."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from flyte_ddp.distributed import COLLECTIVE_TIMEOUT
from flyte_ddp.errors import UserError
from flyte_ddp.job import Job
from flyte_ddp.train import train

PR_SET_PDEATHSIG = 1  # linux/prctl.h
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h of glibc


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks meet, and which of them this one is."""

    rank: int
    world_size: int
    local_rank: int
    store: Path  # a file in a fresh folder, through which they exchange their addresses
    records: Path  # folder in which each rank leaves a record of its completion or its error


def run_rank(job: Job, rendezvous: Rendezvous) -> None:
    """Runs one rank of a gang from its first line to its record; a failed one ends the process with exit code 1."""
    die_with_parent()
    faulthandler.enable()
    try:
        torch.set_num_threads(job.hardware.threads)
        if job.hardware.device_type == "cpu":
            keep_freed_memory()
        join_process_group(job, rendezvous)
        train(job)
        dist.barrier()  # no rank closes its connections while another still needs them
        dist.destroy_process_group()
    except BaseException as error:
        write_record(rendezvous, error)
        # Ends the process without the clean-up that waits for peers, which may be gone.
        sys.stderr.flush()
        os._exit(1)
    write_record(rendezvous, None)


def join_process_group(job: Job, rendezvous: Rendezvous) -> None:
    """Meets the other ranks; each binds a free port and then says which, so no two runs are in each other's way."""
    store = FileStore(str(rendezvous.store), rendezvous.world_size)
    device = None
    if job.hardware.device_type == "cuda":
        device = torch.device("cuda", rendezvous.local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        job.hardware.backend,
        store=store,
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device,
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


def die_with_parent() -> None:
    """Asks Linux to kill this process when the thread that started it ends, so that no rank outlives its launcher."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def write_record(rendezvous: Rendezvous, error: BaseException | None) -> None:
    """Leaves this rank's record: the launcher takes a process that exits without one for a failure."""
    record: dict[str, object] = {"rank": rendezvous.rank, "time": time.time()}
    if error is not None:
        record |= {
            "type": type(error).__name__,
            "message": str(error),
            "users_mistake": isinstance(error, UserError),
            "traceback": "".join(traceback.format_exception(error)),
        }
    name = "error" if error is not None else "completed"
    path = rendezvous.records / f"{name}-{rendezvous.rank}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record))
    partial.replace(path)
