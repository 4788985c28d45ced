"""Launches ranks with torch Elastic, whose workers are the ranks: started here, by ``torchrun``, or by Flyte's plugin.

Elastic starts workers, finds out which rank each is, ends all of a host when one has failed, and starts all again as
often as it may. What ranks do in its workers is in elastic_rank.py.
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
    lead,
    recorded,
)
from flyte_ddp.launch.remote.rendezvous import from_newest_checkpoint
from flyte_ddp.launch.supervise.failures import was_killed
from flyte_ddp.launch.supervise.processes import main_script_hidden
from flyte_ddp.launch.supervise.stopping import stop_error
from flyte_ddp.process import descendants_killed_at_end, out_of_memory_kills, signal_handlers
from flyte_ddp.runs import checkpoint
from flyte_ddp.runs.job import Job

__all__ = ["failure", "follow", "hardware", "is_leader", "launch", "log_kept_quiet", "recorded"]


def launch(job: Job, *, num_ranks: int, max_restarts: int = 0) -> None:
    """Run the job: in a worker of Elastic's as rank 0, anywhere else on this machine with workers of its own.

    Args:
        num_ranks: of workers of its own.
        max_restarts: Elastic's own, of those: how often all are started again when one has failed. The run then resumes
            from its newest checkpoint.
    """
    if RUN_ID in os.environ:
        lead(job)
    else:
        start(job, num_ranks, max_restarts)


def hardware(hp: Hyperparameters) -> Hardware:
    """Return what the ranks find, in a worker: Elastic has decided how many they are.

    Raises:
        UserError: hyperparameters that they cannot serve.
    """
    num_ranks, on_this_host = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if hp.num_ranks not in (0, num_ranks):
        message = f"num_ranks={hp.num_ranks}: Elastic has started {num_ranks} workers, so there will be {num_ranks}"
        print(message, file=sys.stderr, flush=True)
    gpus = machine.visible_gpus()
    lack = f"this host has {gpus} for {on_this_host} workers of Elastic's"
    device = capacity.device_type(hp.backend, gpus >= on_this_host, lack)
    threads = max(1, machine.cores() // on_this_host)
    return machine.decide(hp, device, num_ranks, threads=threads, bf16=machine.bf16_support(device))


def start(job: Job, num_ranks: int, max_restarts: int) -> None:
    """Run the job with workers of this process's own."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with (
        log_kept_quiet(),
        surroundings_kept(),
        tempfile.TemporaryDirectory(prefix="flyte-ddp-elastic-") as logs,
        main_script_hidden(),
        descendants_killed_at_end(),
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
        memory_kills = out_of_memory_kills()
        try:
            elastic_launch(config, worker)(job, secrets.token_hex(32))
        except ChildFailedError as error:
            raise failure(error, memory_kills) from None
        except SignalException as stopped:
            raise stop_error(stopped.sigval, checkpoint.newest_step(job.run_folder)) from None


def worker(job: Job, key: str) -> None:
    """Train in one of these workers."""
    os.environ[KEY_VARIABLE] = key
    with recorded():
        if not is_leader():
            follow()
            return
        if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
            job = from_newest_checkpoint(job, "Elastic has started all ranks again")
        lead(job)


def failure(error: Any, memory_kills: int) -> BaseException:
    """Return what the worker raised that failed first, or the error for how it ended.

    Args:
        error: Elastic's ChildFailedError.
        memory_kills: :func:`out_of_memory_kills` before the workers started.
    """
    rank, first = error.get_first_failure()
    if first.exitcode < 0:
        out_of_memory = out_of_memory_kills() > memory_kills
        return was_killed(rank, signal.Signals(-first.exitcode), out_of_memory=out_of_memory)
    try:
        raised = pickle.loads(Path(first.error_file).with_suffix(ERROR_SUFFIX).read_bytes())
    except Exception:  # an exception of a user's own may fail in any way when it is made again
        raised = None
    if isinstance(raised, (UserError, RankError, StoppedError)):
        return raised
    return RankError(f"rank {rank}: {first.message}")


@contextmanager
def log_kept_quiet() -> Iterator[None]:
    """Keep Elastic from printing how its workers ended, as the root cause is raised."""
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
def surroundings_kept() -> Iterator[None]:
    """Restore what Elastic changes in this process: handlers of signals, and environment variables."""
    names = {*os.environ}
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    try:
        with signal_handlers({number: signal.getsignal(number) for number in numbers}):
            yield
    finally:
        for name in os.environ.keys() - names:
            if name.startswith(("TORCHELASTIC_", "TORCH_")):
                del os.environ[name]
