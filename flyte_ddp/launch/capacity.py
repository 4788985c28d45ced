"""How many ranks a cluster has capacity for, and on which devices; waits for hosts that are still to start."""

import sys
import time
from collections.abc import Callable

from flyte_ddp.errors import UnreachableError, UserError

POLL_SECONDS = 0.5


def wait_for_hosts(count: Callable[[], int], wanted: int, what: str, seconds: float) -> None:
    """Wait until there are as many hosts as wanted; print each change of their number to stderr meanwhile.

    Args:
        count: returns how many hosts there are now.
        wanted: how many hosts there must be; 0 does not wait.
        what: name of the hosts in messages, such as "nodes of the Ray cluster".
        seconds: limit of the wait.

    Raises:
        UnreachableError: there are still fewer when ``seconds`` have passed.
    """
    deadline, printed = time.monotonic() + seconds, wanted
    while (found := count()) < wanted:
        if found != printed:
            print(f"{found} of {wanted} {what}", file=sys.stderr, flush=True)
        printed = found
        if time.monotonic() > deadline:
            raise UnreachableError(
                f"only {found} of {wanted} {what} joined within {seconds:g} s (FLYTE_DDP_TIMEOUT); see what the others "
                "wait for (pods: kubectl describe pod), and whether they can reach these"
            )
        time.sleep(POLL_SECONDS)
    if printed != wanted:
        print(f"{found} of {wanted} {what}", file=sys.stderr, flush=True)


def choose_device_type(backend: str, has_gpus: bool, lack: str) -> str:
    """Return ``cuda`` if there are GPUs and the backend is not gloo, else ``cpu``.

    Args:
        has_gpus: whether each rank can have a GPU.
        lack: what is missing if not, for the error's text.

    Raises:
        UserError: the backend is nccl, and there are no GPUs.
    """
    if backend == "nccl" and not has_gpus:
        raise UserError(f"backend='nccl': needs a GPU for each rank, but {lack}; use backend='gloo' or 'auto'")
    return "cuda" if has_gpus and backend != "gloo" else "cpu"


def clamp_ranks(num_ranks: int, capacity: int, what: str, most: int, *, exact: bool = False) -> int:
    """Return the smaller of the requested number of ranks and the capacity; print to stderr if that is fewer.

    Args:
        num_ranks: the requested number; 0 requests ``most``.
        capacity: how many ranks fit.
        what: the capacity in words, such as "the Ray cluster has 4 CPUs".
        exact: whether fewer ranks than requested are an error, as in a pod, where nobody reads messages.

    Raises:
        UserError: no rank fits, or fewer than requested if ``exact``.
    """
    if capacity < 1:
        raise UserError(f"{what}: there is no capacity for a single rank; add workers, or wait until there are some")
    if num_ranks > capacity and exact:
        raise UserError(
            f"num_ranks={num_ranks}: {what}, and each rank needs one; lower num_ranks, or register with more nodes "
            "(FLYTE_DDP_NODES) or a larger profile"
        )
    if num_ranks > capacity:
        print(f"num_ranks={num_ranks}: {what}, so there will be {capacity}", file=sys.stderr, flush=True)
    return min(num_ranks or most, capacity)
