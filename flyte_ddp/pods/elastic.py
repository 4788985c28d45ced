"""Torch Elastic in pods of a PyTorchJob: the pod with the launcher, and the replacement of a lost pod."""

import atexit
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from flyte_ddp.core.errors import StoppedError, UnreachableError, print_to_stderr
from flyte_ddp.core.settings import read_whole_number_variable
from flyte_ddp.pods.retries import PodTerminated

if TYPE_CHECKING:
    from flyte_ddp.engines.elastic_node import Node

STORE_VARIABLE = "PET_RDZV_ENDPOINT"  # host:port of Elastic's store, set by the operator in pods of a PyTorchJob
MEET_VARIABLE = "FLYTE_DDP_MEET_SECONDS"  # how many seconds pods wait for each other
UPLOAD_SECONDS = 600.0  # for the launcher's pod to upload its outputs
POLL_SECONDS = 0.5


def is_only_pod() -> bool:
    """Return whether this pod does not belong to a PyTorchJob."""
    return STORE_VARIABLE not in os.environ


def has_launcher() -> bool:
    """Return whether this pod of a PyTorchJob is the host of Elastic's store, where the launcher runs."""
    return os.environ[STORE_VARIABLE].rpartition(":")[0] == socket.gethostname()


@contextmanager
def join_job(
    run_id: str, nodes: tuple[int, int], num_workers: int, retries: int, rules: Mapping[str, Any]
) -> Iterator["Node"]:
    """Connect this pod to the other pods of a PyTorchJob, and yield this pod's agent of torch Elastic.

    If Elastic's store is lost, or this pod gets SIGTERM, ends this process at once. Kubeflow's operator then starts a
    replacement of the pod, which does not count as an attempt of Flyte.

    Args:
        run_id: The name of the job.
        nodes: The smallest and the largest number of pods.
        num_workers: The number of ranks in this pod.
        retries: How often this pod's agents start again after a failure.
        rules: Options of Elastic's rendezvous.

    Raises:
        UnreachableError: The pods did not meet within FLYTE_DDP_MEET_SECONDS.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters, RendezvousTimeoutError

    from flyte_ddp.engines.elastic_node import Node, prepare_elastic

    store = os.environ[STORE_VARIABLE]
    try:
        with prepare_elastic():
            parameters = RendezvousParameters("c10d", store, run_id, *nodes, is_host=has_launcher(), **rules)
            secret = run_id.encode()
            yield Node(parameters, num_workers, secret=secret, retries=retries, poll_seconds=POLL_SECONDS)
    except (StoppedError, PodTerminated):
        exit_for_replacement("this pod must end", 128 + signal.SIGTERM)
    except RendezvousTimeoutError:
        raise UnreachableError(
            f"not all required pods reached {store} within {read_whole_number_variable(MEET_VARIABLE)} s "
            f"({MEET_VARIABLE}); check which pods are not running, and why; the next attempt will try again"
        ) from None
    except (RendezvousError, DistError) as lost:
        exit_for_replacement(f"Elastic's store at {store} is gone ({type(lost).__name__})", 1)


def run_ranks_until_end(node: "Node") -> None:
    """Run this pod's ranks until the job is over. The launcher is in another pod.

    Afterwards, makes this process sleep at its exit for up to 600 s. During this time the launcher's pod may still
    upload outputs.
    """
    atexit.register(sleep_until_deleted)
    node.run()


def exit_for_replacement(reason: str, code: int) -> NoReturn:
    """Print a reason to stderr, and end this process at once with the exit ``code``. The operator replaces this pod."""
    print_to_stderr(f"{reason}; the operator starts a replacement")
    os._exit(code)  # without an error, the platform continues this attempt of the task


def sleep_until_deleted() -> None:
    """Sleep for 600 s, while the launcher's pod uploads. During the sleep, SIGTERM ends this process with code 0."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    time.sleep(UPLOAD_SECONDS)
