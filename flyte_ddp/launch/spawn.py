"""Launches ranks on this machine with torch.multiprocessing's spawn."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import ProcessException, spawn

from flyte_ddp.errors import RankError, UserError
from flyte_ddp.launch.rank import Rendezvous, run_rank
from flyte_ddp.train import Job, train

GRACE_SECONDS = 2.0  # between asking survivors of a failed gang to end and killing them


def launch(job: Job, *, num_ranks: int) -> None:
    """Runs the job on ``num_ranks`` processes; one rank runs in this process, without a process group.

    Raises:
        UserError: the user's mistake, as the rank that failed first reported it.
        RankError: any other failure of a rank, named by the rank that failed first.

    """
    if num_ranks == 1:
        with one_rank_here(job):
            train(job)
        return
    with tempfile.TemporaryDirectory(prefix="flyte-ddp-") as folder:
        records = Path(folder)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with main_script_hidden():
            arguments = (job, num_ranks, store.port, records)
            gang = spawn(start_rank, args=arguments, nprocs=num_ranks, join=False)  # type: ignore[no-untyped-call]
        try:
            # torch reports whichever failed process it meets first; the ranks' own records say which was the cause.
            while not gang.join(grace_period=GRACE_SECONDS):
                pass
        except ProcessException:
            raise first_failure(records, gang.processes) from None
        finally:
            for process in gang.processes:  # after KeyboardInterrupt, say
                if process.is_alive():
                    process.kill()
                process.join()
        if incomplete := [rank for rank in range(num_ranks) if not (records / f"completed-{rank}.json").exists()]:
            raise RankError(f"rank {incomplete[0]} ended with exit code 0 before it had finished training")


def start_rank(rank: int, job: Job, num_ranks: int, port: int, records: Path) -> None:
    """A spawned process's first function."""
    run_rank(job, Rendezvous(rank, num_ranks, local_rank=rank, host="127.0.0.1", port=port, records=records))


def first_failure(records: Path, processes: list[Any]) -> Exception:
    """The error of the rank that failed first; a rank killed by a signal left no record and precedes its victims."""
    for rank, process in enumerate(processes):
        process.join()
        if process.exitcode is not None and process.exitcode < 0 and not list(records.glob(f"*-{rank}.json")):
            name = signal.Signals(-process.exitcode).name
            # The launcher itself ends survivors with these two; such a rank is a victim if another one left a record.
            if name in ("SIGTERM", "SIGKILL") and list(records.glob("error-*.json")):
                continue
            hint = " (SIGKILL is often the kernel's out-of-memory killer)" if name == "SIGKILL" else ""
            return RankError(f"rank {rank} was killed by {name}{hint}")
    errors = [json.loads(path.read_text()) for path in records.glob("error-*.json")]
    if not errors:
        codes = {rank: process.exitcode for rank, process in enumerate(processes)}
        return RankError(f"ranks ended without a record of completion; exit codes: {codes}")
    first = min(errors, key=lambda error: error["time"])
    if first["users_mistake"]:
        return UserError(first["message"])
    return RankError(f"rank {first['rank']}: {first['type']}: {first['message']}\n\n{first['traceback']}")


@contextmanager
def main_script_hidden() -> Iterator[None]:
    """Keeps spawned processes from running this process's main script (``pyflyte``) again, which costs 0.7 s each."""
    main = sys.modules["__main__"]
    hidden = {name: getattr(main, name) for name in ("__file__", "__spec__") if getattr(main, name, None) is not None}
    # `python -m` programs are found by their spec, scripts by their file; ranks need neither.
    if "__file__" in hidden:
        del main.__file__
    main.__spec__ = None
    try:
        yield
    finally:
        for name, value in hidden.items():
            setattr(main, name, value)


@contextmanager
def one_rank_here(job: Job) -> Iterator[None]:
    """Sets this process up as the only rank, and sets it back."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(job.hardware.threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
