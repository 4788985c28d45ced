"""Asking again where another try may help."""

import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from flyte_ddp.storage.failures import AlteredError, UnavailableError

ATTEMPTS = 4
FIRST_DELAY = 1.0  # seconds; doubled each time

Result = TypeVar("Result")


def retried(
    addresses: str | Sequence[str], action: Callable[[str], Result], note: Callable[[str], object] = lambda _: None
) -> Result:
    """Return the result of ``action`` for the address, or for the first of several for which it succeeds.

    A round tries all addresses in order, and between rounds there is a pause that doubles, shortened at random so that
    many pods don't come back together. Left out of later rounds are addresses that failed for good, or whose file was
    altered twice (once may have been the network).

    Args:
        addresses: one, or several of the same file.
        action: reads from or writes to the address that it is given.
        note: is told of each pause, and why.

    Raises:
        UnavailableError: the last failure; for a list of addresses, what was wrong with each.
    """
    remaining = [addresses] if isinstance(addresses, str) else [*addresses]
    failures: dict[str, UnavailableError] = {}
    for attempt in range(ATTEMPTS):
        for address in tuple(remaining):
            try:
                return action(address)
            except UnavailableError as error:
                altered_again = isinstance(error, AlteredError) and isinstance(failures.get(address), AlteredError)
                failures[address] = error
                if not error.transient or altered_again:
                    remaining.remove(address)
        if not remaining or attempt + 1 == ATTEMPTS:
            break
        delay = FIRST_DELAY * 2**attempt * random.uniform(0.5, 1.0)
        note(f"{remaining[0]}: {failures[remaining[0]]}; next try in {delay:.1f} s")
        time.sleep(delay)
    if isinstance(addresses, str):
        raise failures[addresses] from None
    reasons = "; ".join(f"{address}: {failure}" for address, failure in failures.items())
    raise UnavailableError(reasons, transient=any(failure.transient for failure in failures.values()))
