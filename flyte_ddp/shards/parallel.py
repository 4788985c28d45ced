"""Work that threads share, with results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def in_parallel(function: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Iterator[Result]]:
    """Gives the results in the order of the items; the threads are ahead of who takes them by a few items at most."""
    pool = ThreadPoolExecutor(threads)

    def results() -> Iterator[Result]:
        pending: deque[Future[Result]] = deque()
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) >= 2 * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    try:
        yield results()
    finally:
        pool.shutdown(cancel_futures=True)
