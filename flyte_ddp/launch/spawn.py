"""Launches ranks on this machine as spawned processes, and watches over them.

This is what ``torch.multiprocessing.spawn`` does, without its import of torch, which the launcher itself does not need:
the ranks start that much earlier. They meet in a file of a fresh folder, so that no port is chosen before it is bound.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from flyte_ddp.errors import PeerGoneError, RankError, UserError
from flyte_ddp.job import Job

GRACE_SECONDS = 2.0  # between asking the survivors of a failed gang to end and killing them


def launch(job: Job, *, num_ranks: int) -> None:
    """Runs the job on ``num_ranks`` processes; one rank runs in this process, without a process group.

    Raises:
        UserError: the user's mistake, as the rank that failed first reported it.
        RankError: any other failure of a rank, named by the rank that failed first.
    """
    if num_ranks == 1:
        with one_rank_here(job):
            from flyte_ddp.train import train

            train(job)
        return
    with tempfile.TemporaryDirectory(prefix="flyte-ddp-") as folder:
        records = Path(folder)
        context = multiprocessing.get_context("spawn")
        gang: list[BaseProcess] = [
            context.Process(target=start_rank, args=(job, rank, num_ranks, records), name=f"rank {rank}")
            for rank in range(num_ranks)
        ]
        try:
            with main_script_hidden():
                for process in gang:
                    process.start()
            failure = watch(gang, records)
        finally:
            end(gang)
        if failure:
            raise failure


def start_rank(job: Job, rank: int, num_ranks: int, records: Path) -> None:
    """A spawned process's first function."""
    from flyte_ddp.launch.rank import Rendezvous, run_rank

    run_rank(job, Rendezvous(rank, num_ranks, local_rank=rank, store=records / "store", records=records))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # all is written: taking the interpreter with torch apart would cost another second


def watch(gang: Sequence[BaseProcess], records: Path) -> Exception | None:
    """Waits until all ranks have completed, and returns None, or one has failed, and returns its error."""
    waiting = set(range(len(gang)))
    while waiting:
        connection.wait([gang[rank].sentinel for rank in waiting])
        ended = {rank for rank in waiting if gang[rank].exitcode is not None}
        if any(not (records / f"completed-{rank}.json").exists() for rank in ended):
            return first_failure(gang, records)
        waiting -= ended
    return None


def first_failure(gang: Sequence[BaseProcess], records: Path) -> Exception:
    """The error of the rank that failed first: what a rank's death does to the others comes after it.

    A rank that was killed leaves no record, and its victims' records only say that it was gone. SIGABRT is the
    exception: gloo aborts in a victim, too, when a peer's connection closes at the wrong moment.
    """
    signals = {rank: -code for rank, process in enumerate(gang) if (code := process.exitcode) is not None and code < 0}
    killed = [rank for rank, number in signals.items() if number != signal.SIGABRT]
    errors = [json.loads(path.read_text()) for path in records.glob("error-*.json")]
    causes = [error for error in errors if error["type"] != PeerGoneError.__name__]
    if killed or (signals and not causes):
        rank = min(killed or signals)
        name = signal.Signals(signals[rank]).name
        hint = ", which is often the kernel's out-of-memory killer" if name == "SIGKILL" else ""
        return RankError(f"rank {rank} was killed by {name}{hint}")
    silent = [
        rank
        for rank, process in enumerate(gang)
        if process.exitcode is not None and not any(records.glob(f"*-{rank}.json"))
    ]
    if causes or not silent:
        first = min(causes or errors, key=lambda error: error["time"])
        if first["users_mistake"]:
            return UserError(first["message"])
        return RankError(f"rank {first['rank']}: {first['type']}: {first['message']}\n\n{first['traceback']}")
    code = gang[silent[0]].exitcode
    return RankError(f"rank {silent[0]} ended with exit code {code} before it had finished training")


def end(gang: Sequence[BaseProcess]) -> None:
    """Ends the ranks that are still there: asked first, then killed."""
    started = [process for process in gang if process.pid is not None]
    for process in started:
        if process.is_alive():
            process.terminate()
    for process in started:
        process.join(GRACE_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()


@contextmanager
def main_script_hidden() -> Iterator[None]:
    """Keeps spawned processes from running this process's main script (``pyflyte``) again, which costs 0.7 s each."""
    main = sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), main.__spec__
    if file is not None:
        del main.__file__
    main.__spec__ = None
    try:
        yield
    finally:
        main.__spec__ = spec
        if file is not None:
            main.__file__ = file


@contextmanager
def one_rank_here(job: Job) -> Iterator[None]:
    """Sets this process up as the only rank, and sets it back."""
    import torch

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(job.hardware.threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
