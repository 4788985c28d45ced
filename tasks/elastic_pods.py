"""Elastic in pods of a PyTorchJob: which of them may end when, and how one joins in a lost pod's place."""

import atexit
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from flytekit.extend import IgnoreOutputs

from flyte_ddp.errors import UnreachableError
from tasks import recovery

STORE = "PET_RDZV_ENDPOINT"  # host and port of Elastic's store, set by the operator in pods of a PyTorchJob
MEET_SECONDS = 900  # for all pods to run
UPLOAD_SECONDS = 600.0  # for rank 0's pod to upload its outputs


@contextmanager
def one_of_several() -> Iterator[None]:
    """In a pod of several: the others survive a lost pod, and rank 0's pod is the first that ends.

    That ends the job, and the operator deletes the pods that still run.

    Raises:
        UnreachableError: the others did not join.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError

    if STORE not in os.environ:
        yield
        return
    store = os.environ[STORE]
    try:
        with address_published_each_time():
            yield
    except (IgnoreOutputs, recovery.Sigterm) as ended:
        if isinstance(ended, recovery.Sigterm) or isinstance(ended.__context__, SignalException):
            leave_to_the_operator("this pod is to end", 128 + signal.SIGTERM)
        atexit.register(wait_to_be_deleted)  # rank 0 has not uploaded its outputs yet
        raise
    except RendezvousTimeoutError:
        raise UnreachableError(
            f"the pods that are needed did not all come to {store} within {MEET_SECONDS} s: see which of them is not "
            "running, and why; the same run will try again"
        ) from None
    except (RendezvousError, DistError) as lost:
        leave_to_the_operator(f"Elastic's store at {store} is gone ({type(lost).__name__})", 1)
    except BaseException:
        if store.rpartition(":")[0] != socket.gethostname():  # the first of the pods is rank 0's, by their names
            atexit.register(wait_to_be_deleted)  # it may still upload a checkpoint
        raise


@contextmanager
def address_published_each_time() -> Iterator[None]:
    """Has rank 0 publish its address at each rendezvous.

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
    """Ends this process without an error for Flyte, to which the attempt continues."""
    print(f"{reason}; the operator starts another one in this one's place", file=sys.stderr, flush=True)
    os._exit(code)


def wait_to_be_deleted() -> None:
    """Waits for SIGTERM, or for longer than rank 0's pod needs."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    time.sleep(UPLOAD_SECONDS)
