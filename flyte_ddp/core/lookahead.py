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
    """Call ``start`` with each item, up to ``ahead`` items earlier than needed, and yield the results in order.

    Calls nothing before the first ``next()``.
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
    """Call ``function`` with each item in ``threads`` threads, and yield an iterator over the results, in order.

    Up to ``ahead`` later calls (default 2 * threads - 1) are started before the iterator needs the results. An
    exception of a call is raised when the iterator reaches the call's result. Each thread first calls ``initializer``.
    The end of the block cancels calls that have not begun, and does not wait for running calls.
    """
    pool = ThreadPoolExecutor(threads, initializer=initializer)
    number = 2 * threads - 1 if ahead is None else ahead
    try:
        yield (future.result() for future in start_ahead(lambda item: pool.submit(function, item), items, number))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
