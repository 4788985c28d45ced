"""How many ranks a cluster has room for, and on what devices; waits for hosts that are still to come."""

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
        seconds: to wait for them.

    Raises:
        UnreachableError: they have not come by then; another try may have more luck.
    """
    deadline, told = time.monotonic() + seconds, wanted
    while (there := count()) < wanted:
        if there != told:
            print(f"{there} of {wanted} {what}", file=sys.stderr, flush=True)
        told = there
        if time.monotonic() > deadline:
            raise UnreachableError(
                f"{there} of {wanted} {what} have come within {seconds:g} s (FLYTE_DDP_TIMEOUT): the others could not "
                "be started, or do not reach these; look at what their pods wait for"
            )
        time.sleep(POLL_SECONDS)
    if told != wanted:
        print(f"{there} of {wanted} {what}", file=sys.stderr, flush=True)


def device_type(hp: Hyperparameters, has_gpus: bool, lack: str) -> str:
    """``cuda`` or ``cpu``.

    Args:
        has_gpus: whether there is a GPU for each rank.
        lack: what there is if not, in words.

    Raises:
        UserError: GPUs were asked for, and there are none.
    """
    if hp.backend == "nccl" and not has_gpus:
        raise UserError(f"backend='nccl': needs a GPU for each rank, but {lack}; use backend='gloo' or 'auto'")
    return "cuda" if has_gpus and hp.backend != "gloo" else "cpu"


def limited(hp: Hyperparameters, room: int, what: str, most: int, *, exact: bool = False) -> int:
    """As many ranks as were asked for, but no more than there is room for; where that is fewer, it is said.

    Args:
        room: for how many.
        what: there is, in words.
        most: ranks where no number was asked for.
        exact: fewer than were asked for are an error, as in a pod, where nobody reads along.

    Raises:
        UserError: there is no room at all, or not for all, and ``exact``.
    """
    if room < 1:
        raise UserError(f"{what}: there is no room for a single rank; add workers, or wait until there are some")
    if hp.num_ranks > room and exact:
        raise UserError(
            f"num_ranks={hp.num_ranks}: {what}, and each rank needs one; lower num_ranks, or register with more nodes "
            "(FLYTE_DDP_NODES) or a larger profile"
        )
    if hp.num_ranks > room:
        print(f"num_ranks={hp.num_ranks}: {what}, so there will be {room}", file=sys.stderr, flush=True)
    return min(hp.num_ranks or most, room)
