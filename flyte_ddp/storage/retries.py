"""Asking again where another try may help."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from flyte_ddp.storage.failures import AlteredError, UnavailableError

ATTEMPTS = 4
FIRST_DELAY = 1.0  # seconds; doubled each time

Result = TypeVar("Result")


class AllFailedError(Exception):
    """No place had the file; ``failures`` has the last failure of each."""

    def __init__(self, failures: dict[str, UnavailableError]) -> None:
        super().__init__("; ".join(f"{address}: {error}" for address, error in failures.items()))
        self.failures = failures


def with_retries(
    name: str, addresses: Sequence[str], action: Callable[[str], Result], note: Callable[[str], object] = lambda _: None
) -> Result:
    """The result of ``action`` for the first address for which it succeeds.

    A round tries all addresses in order, and between rounds there is a pause that doubles, shortened at random so that
    many pods don't come back together. Left out of later rounds are addresses that failed for good, or whose file was
    altered twice (once may have been the network).

    Args:
        name: of what is wanted, for ``note``, which is told of each pause.

    Raises:
        AllFailedError: no address gave a result.
    """
    remaining = list(addresses)
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
        note(f"{name}: {failures[remaining[0]]}; next try in {delay:.1f} s")
        time.sleep(delay)
    raise AllFailedError(failures)


def retried(address: str, action: Callable[[str], Result], note: Callable[[str], object] = lambda _: None) -> Result:
    """:func:`with_retries` where there is one address only.

    Raises:
        UnavailableError: the last failure.
    """
    try:
        return with_retries(address, [address], action, note)
    except AllFailedError as error:
        raise error.failures[address] from None
