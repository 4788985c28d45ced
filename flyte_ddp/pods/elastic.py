"""Torch Elastic in pods of a PyTorchJob: the order in which pods end, and the replacement of a lost pod."""

import atexit
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from flyte_ddp.core.errors import UnreachableError, print_to_stderr
from flyte_ddp.core.settings import read_whole_number
from flyte_ddp.pods.retries import PodTerminated

STORE_VARIABLE = "PET_RDZV_ENDPOINT"  # host:port of Elastic's store, set by the operator in pods of a PyTorchJob
MEET_VARIABLE = "FLYTE_DDP_MEET_SECONDS"  # how many seconds pods wait for each other
WORKER_VARIABLE = "TORCHELASTIC_RUN_ID"  # set in Elastic's workers. Equals launch.elastic.RUN_ID, a slow import.
UPLOAD_SECONDS = 600.0  # for rank 0's pod to upload its outputs


def is_only_pod() -> bool:
    """Return whether this pod does not belong to a PyTorchJob."""
    return STORE_VARIABLE not in os.environ


def has_rank_0() -> bool:
    """Return whether this pod has rank 0: the only pod of a job, or the host of Elastic's store."""
    host, _, _ = os.environ.get(STORE_VARIABLE, "").rpartition(":")
    return host in ("", socket.gethostname())


@contextmanager
def end_after_rank_0(ended_without_outputs: type[BaseException]) -> Iterator[None]:
    """If the block raises, let this pod of a PyTorchJob end only after rank 0's pod, which may still upload.

    ``ended_without_outputs`` is the exception by which Elastic's plugin ends pods without outputs. After this
    exception, or another exception in a pod without rank 0, this process sleeps at its exit for up to 600 s. After
    SIGTERM, or if Elastic's store is lost, the process exits at once, and the operator starts another pod. Outside a
    PyTorchJob does nothing.

    Raises:
        UnreachableError: The pods did not meet within FLYTE_DDP_MEET_SECONDS.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError

    if is_only_pod():
        yield
        return
    store = os.environ[STORE_VARIABLE]
    try:
        with publish_address_each_time():
            yield
    except (ended_without_outputs, PodTerminated) as ended:
        if isinstance(ended, PodTerminated) or isinstance(ended.__context__, SignalException):
            exit_for_replacement("this pod must end", 128 + signal.SIGTERM)
        atexit.register(sleep_until_deleted)  # rank 0 has not uploaded its outputs yet
        raise
    except RendezvousTimeoutError:
        raise UnreachableError(
            f"not all required pods reached {store} within {read_whole_number(MEET_VARIABLE)} s ({MEET_VARIABLE}); "
            "check which pods are not running, and why; the next attempt will try again"
        ) from None
    except (RendezvousError, DistError) as lost:
        exit_for_replacement(f"Elastic's store at {store} is gone ({type(lost).__name__})", 1)
    except BaseException:
        if not has_rank_0():
            atexit.register(sleep_until_deleted)  # rank 0's pod may still upload a checkpoint
        raise


@contextmanager
def publish_address_each_time() -> Iterator[None]:
    """Make rank 0 publish its address at each rendezvous in the block, for pods that replace a lost pod.

    Without this, torch's handler publishes the address at the first rendezvous only. The handler is patched for the
    whole process.
    """
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler as Handler

    original = Handler.next_rendezvous

    def next_rendezvous(handler: Handler) -> Any:
        handler._bootstrap_store_info = None
        return original(handler)

    Handler.next_rendezvous = next_rendezvous  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Handler.next_rendezvous = original  # type: ignore[method-assign]


def exit_for_replacement(reason: str, code: int) -> NoReturn:
    """Print a reason to stderr and end this process at once. The operator then replaces this pod."""
    print_to_stderr(f"{reason}; the operator starts a replacement")
    os._exit(code)  # without an error, the platform continues this attempt of the task


def sleep_until_deleted() -> None:
    """Sleep for 600 s while rank 0's pod uploads. SIGTERM ends this process with code 0."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    time.sleep(UPLOAD_SECONDS)
