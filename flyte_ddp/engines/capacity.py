"""A cluster's capacity for ranks, and the wait for hosts that have not started yet."""

import time
from collections.abc import Callable

from flyte_ddp.core.errors import UnreachableError, UserError, print_to_stderr

POLL_SECONDS = 0.5


def wait_for_hosts(count_hosts: Callable[[], int], wanted: int, hosts_name: str, seconds: float) -> None:
    """Wait until ``count_hosts()`` is at least ``wanted``, and print each change of the number.

    Calls ``count_hosts`` twice a second. If enough hosts exist at once, prints nothing. ``hosts_name`` names the hosts
    in messages, such as "nodes of the Ray cluster".

    Raises:
        UnreachableError: Too few hosts have joined within ``seconds``.
    """
    deadline, printed = time.monotonic() + seconds, wanted
    while (found := count_hosts()) < wanted:
        if found != printed:
            print_to_stderr(f"{found} of {wanted} {hosts_name}")
        printed = found
        if time.monotonic() > deadline:
            raise UnreachableError(
                f"only {found} of {wanted} {hosts_name} joined within {seconds:g} s (FLYTE_DDP_TIMEOUT); check why the "
                "rest did not start (pods: kubectl describe pod), and whether the rest can reach the cluster"
            )
        time.sleep(POLL_SECONDS)
    if printed != wanted:
        print_to_stderr(f"{found} of {wanted} {hosts_name}")


def clamp_ranks(num_ranks: int, capacity: int, capacity_in_words: str, most: int, *, exact: bool = False) -> int:
    """Return ``num_ranks``, but at most ``capacity``. If ``num_ranks`` is 0, ``most`` takes its place.

    Prints a message if ``num_ranks`` is reduced. ``capacity_in_words`` is a part of messages, such as "the Ray cluster
    has 4 GPUs".

    Raises:
        UserError: ``capacity`` is 0, or a reduction is necessary and ``exact`` is True.
    """
    if capacity < 1:
        raise UserError(f"{capacity_in_words}: too few for a single rank; add workers, or retry when workers join")
    if num_ranks > capacity:
        if exact:
            raise UserError(
                f"num_ranks={num_ranks}: {capacity_in_words}, and each rank needs one; lower num_ranks, or use a "
                "larger cluster (nodes= or resources of your task, FLYTE_DDP_NODES or a profile of our workflows)"
            )
        print_to_stderr(f"num_ranks={num_ranks}: {capacity_in_words}; starting {capacity} ranks")
    return min(num_ranks or most, capacity)
