"""Elastic in pods of a PyTorchJob: which of them may end when, and how one that takes a lost one's place comes in."""

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
HANDING_OVER_SECONDS = 600.0  # for rank 0's pod to send its outputs


@contextmanager
def one_of_several() -> Iterator[None]:
    """In a pod of several, has a lost pod be no end of the others, and rank 0's be the first that ends.

    That ends the job, and the operator deletes those that still run.

    Raises:
        UnreachableError: the others did not come.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError

    if STORE not in os.environ:
        yield
        return
    store = os.environ[STORE]
    try:
        with newcomers_let_in():
            yield
    except (IgnoreOutputs, recovery.Sigterm) as ended:
        if isinstance(ended, recovery.Sigterm) or isinstance(ended.__context__, SignalException):
            leave_to_the_operator("this pod is to end", 128 + signal.SIGTERM)
        atexit.register(wait_to_be_deleted)  # rank 0's outputs are still to come
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
            atexit.register(wait_to_be_deleted)  # it may still send a checkpoint
        raise


@contextmanager
def newcomers_let_in() -> Iterator[None]:
    """Has each meeting's rank 0 say where it is.

    torch's says so once and remembers it; one that comes to a later meeting, in a lost pod's place, would wait for it.
    """
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler as Handler

    meet = Handler.next_rendezvous

    def meet_anew(handler: Handler) -> Any:
        handler._bootstrap_store_info = None
        return meet(handler)

    Handler.next_rendezvous = meet_anew  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Handler.next_rendezvous = meet  # type: ignore[method-assign]


def leave_to_the_operator(reason: str, code: int) -> NoReturn:
    """Ends this process without a word to Flyte, for which the attempt goes on."""
    print(f"{reason}; the operator starts another one in this one's place", file=sys.stderr, flush=True)
    os._exit(code)


def wait_to_be_deleted() -> None:
    """Until SIGTERM, or for longer than rank 0's pod needs."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    time.sleep(HANDING_OVER_SECONDS)
