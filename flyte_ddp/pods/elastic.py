"""Torch Elastic, locally and in pods of a PyTorchJob: which pods may end when, and how one replaces a lost one."""

import atexit
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from flyte_ddp.errors import StoppedError, UnreachableError, UserError
from flyte_ddp.pods.paths import folder_for
from flyte_ddp.pods.platforms import Platform
from flyte_ddp.pods.retries import Sigterm
from flyte_ddp.runs import run_lock
from flyte_ddp.runs.failed_run import explain, newest_step
from flyte_ddp.settings import read_whole_number

STORE = "PET_RDZV_ENDPOINT"  # host and port of Elastic's store, set by the operator in pods of a PyTorchJob
# Set in Elastic's workers: the working directory of the pod's task, as workers have others; empty in a local run.
POD_FOLDER = "FLYTE_DDP_POD_FOLDER"
UPLOAD_SECONDS = 600.0  # for rank 0's pod to upload its outputs


def check_host_name() -> None:
    """Raise UserError where this machine's name has no address: Elastic's workers would wait ten minutes for one."""
    name = socket.getfqdn()
    try:
        socket.getaddrinfo(name, None)
    except socket.gaierror as error:
        raise UserError(
            f"host name {name!r} has no address ({error.strerror}), and torch Elastic needs one; add a line "
            f"'127.0.0.1 {name}' to /etc/hosts, or run training_wf"
        ) from None


@contextmanager
def add_newest_step(platform: Platform, run_version: str) -> Iterator[None]:
    """Add to a local run's error after which step it continues, which workers other than rank 0 do not know."""
    try:
        yield
    except BaseException as error:
        if not platform.is_local():
            raise
        folder = folder_for(platform, run_version)
        if isinstance(error, StoppedError):
            raise StoppedError(error.signal, newest_step(folder)) from None
        explain(error, folder)
        raise


@contextmanager
def environment_for_workers(platform: Platform, root: Path) -> Iterator[None]:
    """Set variables of this process that its workers inherit, and put the project's root first in ``sys.path``.

    The variables say whether the run is local, where its folders are, and which of these are locked for it.
    """
    pod_folder = "" if platform.is_local() else str(platform.pod_folder())
    variables = {POD_FOLDER: pod_folder, **run_lock.held_for_children()}
    os.environ.update(variables)
    sys.path.insert(0, str(root))
    try:
        yield
    finally:
        sys.path.remove(str(root))
        for name in variables:
            os.environ.pop(name, None)


@contextmanager
def one_of_several_pods(ended_without_outputs: type[BaseException]) -> Iterator[None]:
    """In a pod of several, outlive a lost pod, and let rank 0's pod end first, which ends the job.

    The operator then deletes the pods that still run. This process waits for that up to UPLOAD_SECONDS at its exit, or
    exits at once where the operator is to start another pod in its place.

    Args:
        ended_without_outputs: What is raised in the block in a pod that has no outputs.

    Raises:
        UnreachableError: the others did not join within FLYTE_DDP_MEET_SECONDS.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError

    if STORE not in os.environ:
        yield
        return
    store = os.environ[STORE]
    try:
        with publish_address_each_time():
            yield
    except (ended_without_outputs, Sigterm) as ended:
        if isinstance(ended, Sigterm) or isinstance(ended.__context__, SignalException):
            leave_to_the_operator("this pod is to end", 128 + signal.SIGTERM)
        atexit.register(wait_to_be_deleted)  # rank 0 has not uploaded its outputs yet
        raise
    except RendezvousTimeoutError:
        raise UnreachableError(
            f"the pods that are needed did not all come to {store} within {meet_seconds()} s: see which of them is not "
            "running, and why; the same run will try again"
        ) from None
    except (RendezvousError, DistError) as lost:
        leave_to_the_operator(f"Elastic's store at {store} is gone ({type(lost).__name__})", 1)
    except BaseException:
        if store.rpartition(":")[0] != socket.gethostname():  # the first of the pods is rank 0's, by their names
            atexit.register(wait_to_be_deleted)  # it may still upload a checkpoint
        raise


def meet_seconds() -> int:
    """Return how many seconds the pods wait until all of them run."""
    return read_whole_number("FLYTE_DDP_MEET_SECONDS")


@contextmanager
def publish_address_each_time() -> Iterator[None]:
    """Replace a method of torch's, so that rank 0 publishes its address at each rendezvous.

    torch publishes it once; a pod that joins a later rendezvous, in a lost pod's place, would wait for it.
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


def leave_to_the_operator(reason: str, code: int) -> NoReturn:
    """End this process at once, without an error for the platform, to which the attempt continues."""
    print(f"{reason}; the operator starts another one in this one's place", file=sys.stderr, flush=True)
    os._exit(code)


def wait_to_be_deleted() -> None:
    """Wait for SIGTERM, and then exit at once; at most UPLOAD_SECONDS, longer than rank 0's pod needs."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    time.sleep(UPLOAD_SECONDS)
