"""How many ranks a cluster has capacity for, and on what devices; waits for hosts that are still to come."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UnreachableError, UserError

POLL_SECONDS = 0.5


def awaited(count: Callable[[], int], wanted: int, what: str, seconds: float) -> None:
    """Returns once there are as many as wanted; while there are fewer, each change is said.

    Args:
        count: how many there are now.
        wanted: how many there must be; 0 waits for none.
        what: they are, in words, such as "nodes of the Ray cluster".
        seconds: to wait for them; then it is an UnreachableError, as another try may have more luck.
    """
    deadline, told = time.monotonic() + seconds, wanted
    while (there := count()) < wanted:
        if there != told:
            print(f"{there} of {wanted} {what}", file=sys.stderr, flush=True)
        told = there
        if time.monotonic() > deadline:
            raise UnreachableError(
                f"{there} of {wanted} {what} have come within {seconds:g} s (FLYTE_DDP_TIMEOUT): the others have not "
                "started, or do not reach these; see what they wait for"
            )
        time.sleep(POLL_SECONDS)
    if told != wanted:
        print(f"{there} of {wanted} {what}", file=sys.stderr, flush=True)


def device_type(hp: Hyperparameters, has_gpus: bool, lack: str) -> str:
    """``cuda`` or ``cpu``; a UserError where GPUs are asked for that are not there, as ``lack`` says in words."""
    if hp.backend == "nccl" and not has_gpus:
        raise UserError(f"backend='nccl': needs a GPU for each rank, but {lack}; use backend='gloo' or 'auto'")
    return "cuda" if has_gpus and hp.backend != "gloo" else "cpu"


def clamp_ranks(hp: Hyperparameters, capacity: int, what: str, most: int, *, exact: bool = False) -> int:
    """As many ranks as were asked for, but no more than there is capacity for; where that is fewer, it is said.

    Args:
        hp: of the run.
        capacity: for how many ranks there is.
        what: there is, in words.
        most: ranks where no number was asked for.
        exact: fewer than were asked for are a UserError, as in a pod, where nobody reads along.
    """
    if capacity < 1:
        raise UserError(f"{what}: there is no capacity for a single rank; add workers, or wait until there are some")
    if hp.num_ranks > capacity and exact:
        raise UserError(
            f"num_ranks={hp.num_ranks}: {what}, and each rank needs one; lower num_ranks, or register with more nodes "
            "(FLYTE_DDP_NODES) or a larger profile"
        )
    if hp.num_ranks > capacity:
        print(f"num_ranks={hp.num_ranks}: {what}, so there will be {capacity}", file=sys.stderr, flush=True)
    return min(hp.num_ranks or most, capacity)
