"""Launches ranks as workers of torch Elastic, which this process, ``torchrun`` or Flyte's plugin starts.

Elastic starts workers, gives each its rank, ends the workers of a host when one has failed, and restarts all as often
as it may. elastic_rank.py holds what ranks do in its workers.
"""

import logging
import os
import pickle
import secrets
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flyte_ddp import hardware as machine
from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import RankError, StoppedError, UserError
from flyte_ddp.hardware import Hardware
from flyte_ddp.launch import capacity
from flyte_ddp.launch.elastic_rank import (
    ERROR_SUFFIX,
    KEY_VARIABLE,
    POLL_SECONDS,
    RUN_ID,
    follow,
    is_leader,
    pickle_exception,
    train_as_rank_0,
)
from flyte_ddp.launch.remote.rendezvous import resume_from_newest_checkpoint
from flyte_ddp.launch.supervise.failures import killed_rank_error
from flyte_ddp.launch.supervise.processes import hide_main_script
from flyte_ddp.launch.supervise.stopping import stop_error
from flyte_ddp.process import count_out_of_memory_kills, kill_new_descendants_at_end, signal_handlers
from flyte_ddp.runs import checkpoint
from flyte_ddp.runs.job import Job

__all__ = [
    "first_worker_error",
    "follow",
    "hardware",
    "is_leader",
    "launch",
    "pickle_exception",
    "silence_elastic_logs",
]


def hardware(hp: Hyperparameters) -> Hardware:
    """Return the Hardware for the ranks, in a worker of Elastic's, which has decided their number.

    Assumes that all hosts are like this one. Prints to stderr if ``hp.num_ranks`` is another number. Raises UserError
    if the hyperparameters do not fit the hardware.
    """
    num_ranks, on_this_host = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if hp.num_ranks not in (0, num_ranks):
        message = f"num_ranks={hp.num_ranks}: Elastic has started {num_ranks} workers, so there will be {num_ranks}"
        print(message, file=sys.stderr, flush=True)
    gpus = machine.count_gpus()
    lack = f"this host has {gpus} for {on_this_host} workers of Elastic's"
    device = capacity.choose_device_type(hp.backend, gpus >= on_this_host, lack)
    threads = max(1, machine.count_cores() // on_this_host)
    return machine.choose_hardware(hp, device, num_ranks, threads=threads, bf16=machine.bf16_support(device))


def launch(job: Job, *, num_ranks: int, max_restarts: int = 0) -> None:
    """Run the job as rank 0 if this is a worker of Elastic's, else in ``num_ranks`` new workers on this machine.

    Elastic restarts new workers up to ``max_restarts`` times when one has failed; the run then resumes from its newest
    checkpoint. Kills at the end what this thread has started, and restores signal handlers and environment variables
    that Elastic changes. Elastic's logs are in a temporary folder, which is deleted.

    Raises the error of the rank that failed first, or StoppedError or KeyboardInterrupt after a signal.
    """
    if RUN_ID in os.environ:
        train_as_rank_0(job)
        return

    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with (
        silence_elastic_logs(),
        restore_process_state(),
        tempfile.TemporaryDirectory(prefix="flyte-ddp-elastic-") as logs,
        hide_main_script(),
        kill_new_descendants_at_end(),
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            run_id=secrets.token_hex(8),
            local_addr="127.0.0.1",
            max_restarts=max_restarts,
            monitor_interval=POLL_SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        memory_kills = count_out_of_memory_kills()
        try:
            elastic_launch(config, train_in_worker)(job, secrets.token_hex(32))
        except ChildFailedError as error:
            raise first_worker_error(error, memory_kills) from None
        except SignalException as stopped:
            raise stop_error(stopped.sigval, checkpoint.newest_step(job.run_folder)) from None


def train_in_worker(job: Job, key: str) -> None:
    """Train in a worker that launch started, as rank 0 or another rank; the worker's first function.

    Sets FLYTE_DDP_ELASTIC_KEY to ``key``. A restarted rank 0 resumes from the newest checkpoint. An exception is
    pickled for :func:`first_worker_error`.
    """
    os.environ[KEY_VARIABLE] = key
    with pickle_exception():
        if not is_leader():
            follow()
            return
        if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
            job = resume_from_newest_checkpoint(job, "Elastic has started all ranks again")
        train_as_rank_0(job)


def first_worker_error(error: Any, memory_kills: int) -> BaseException:
    """Return the exception of the worker that failed first, or an error that says how the worker ended.

    ``error`` is Elastic's ChildFailedError, ``memory_kills`` what count_out_of_memory_kills returned before the workers
    started. Unpickles the file that the worker has left beside Elastic's error file.
    """
    rank, first = error.get_first_failure()
    if first.exitcode < 0:
        out_of_memory = count_out_of_memory_kills() > memory_kills
        return killed_rank_error(rank, signal.Signals(-first.exitcode), out_of_memory=out_of_memory)
    try:
        raised = pickle.loads(Path(first.error_file).with_suffix(ERROR_SUFFIX).read_bytes())
    except Exception:  # unpickling a user's own exception may raise anything
        raised = None
    if isinstance(raised, (UserError, RankError, StoppedError)):
        return raised
    return RankError(f"rank {rank}: {first.message}")


@contextmanager
def silence_elastic_logs() -> Iterator[None]:
    """Silence two loggers of torch during the block: Elastic would print how workers ended, and that is raised."""
    loggers = [logging.getLogger(f"torch.{name}") for name in ("distributed.elastic", "multiprocessing.spawn")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def restore_process_state() -> Iterator[None]:
    """Restore at the end what Elastic changes in this process: signal handlers, and new TORCH_* variables."""
    names = {*os.environ}
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    try:
        with signal_handlers({number: signal.getsignal(number) for number in numbers}):
            yield
    finally:
        for name in os.environ.keys() - names:
            if name.startswith(("TORCHELASTIC_", "TORCH_")):
                del os.environ[name]
