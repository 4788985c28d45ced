"""How many ranks a cluster has capacity for, and on what devices; waits for hosts that are still to come."""

import sys
import time
from collections.abc import Callable

from flyte_ddp.errors import UnreachableError, UserError

POLL_SECONDS = 0.5


def wait_for_hosts(count: Callable[[], int], wanted: int, what: str, seconds: float) -> None:
    """Wait until there are as many hosts as wanted; print each change while there are fewer.

    Args:
        count: returns how many there are now.
        wanted: how many there must be; 0 waits for none.
        what: their name in messages, such as "nodes of the Ray cluster".
        seconds: to wait at most.

    Raises:
        UnreachableError: they have not come in time.
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


def device_type(backend: str, has_gpus: bool, lack: str) -> str:
    """Return ``cuda`` or ``cpu``; raise UserError, with ``lack`` in its text, if GPUs are asked for and missing."""
    if backend == "nccl" and not has_gpus:
        raise UserError(f"backend='nccl': needs a GPU for each rank, but {lack}; use backend='gloo' or 'auto'")
    return "cuda" if has_gpus and backend != "gloo" else "cpu"


def clamp_ranks(num_ranks: int, capacity: int, what: str, most: int, *, exact: bool = False) -> int:
    """Return the number of ranks: as many as were asked for, but no more than fit; print a message if it is fewer.

    Args:
        num_ranks: asked for; 0: ``most``.
        capacity: how many ranks fit.
        what: the capacity, for messages, such as "the Ray cluster has 4 CPUs".
        exact: raise UserError if fewer ranks fit than were asked for, as in a pod, where nobody reads messages.
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
