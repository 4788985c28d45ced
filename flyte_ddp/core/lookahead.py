"""Iterators that start work before its results are needed, and keep the order of the items."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
Started = TypeVar("Started")
Result = TypeVar("Result")


def start_ahead(start: Callable[[Item], Started], items: Iterable[Item], ahead: int) -> Iterator[Started]:
    """Yield ``start(item)`` of each item in order.

    Before each yield, calls ``start`` for up to ``ahead`` later items. Calls nothing before the first ``next()``.
    """
    started: deque[Started] = deque()
    for item in items:
        started.append(start(item))
        if len(started) > ahead:
            yield started.popleft()
    yield from started


@contextmanager
def map_in_threads(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    threads: int,
    *,
    ahead: int | None = None,
    initializer: Callable[[], object] | None = None,
) -> Iterator[Iterator[Result]]:
    """Yield an iterator over ``function(item)`` of each item in order, computed by ``threads`` threads.

    While the iterator waits for a result, up to ``ahead`` later calls (default 2 * threads - 1) are started. An
    exception of a call is raised when the iterator reaches its result. Each thread first calls ``initializer``. The end
    of the block cancels calls that have not begun, and does not wait for running calls.
    """
    pool = ThreadPoolExecutor(threads, initializer=initializer)
    number = 2 * threads - 1 if ahead is None else ahead
    try:
        yield (future.result() for future in start_ahead(lambda item: pool.submit(function, item), items, number))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
