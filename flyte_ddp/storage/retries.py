"""Retry actions on files after transient errors, with growing pauses."""

import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from flyte_ddp.storage.failures import AlteredError, UnavailableError

ATTEMPTS = 4
FIRST_DELAY = 1.0  # seconds; doubled each time
PRIVATE_RANDOM = random.SystemRandom()  # users' models may draw from Python's global generator

Result = TypeVar("Result")


def retry(
    addresses: str | Sequence[str], action: Callable[[str], Result], note: Callable[[str], object] = lambda _: None
) -> Result:
    """Call ``action(address)`` for each address of a file in turn until one call succeeds, and return its result.

    Makes up to 4 rounds over the addresses, with random pauses of up to 1, 2 and 4 s, which ``note`` announces. Skips
    an address after a permanent error, or after two AlteredErrors in a row (one may be a fault of the network). Of
    several addresses raises one UnavailableError with the last error of each.
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
        # A random part, so that many pods do not return at one moment.
        delay = FIRST_DELAY * 2**attempt * PRIVATE_RANDOM.uniform(0.5, 1.0)
        note(f"{remaining[0]}: {failures[remaining[0]]}; next try in {delay:.1f} s")
        time.sleep(delay)
    if isinstance(addresses, str):
        raise failures[addresses] from None
    reasons = "; ".join(f"{address}: {failure}" for address, failure in failures.items())
    raise UnavailableError(reasons, transient=any(failure.transient for failure in failures.values()))
