"""Start work on items before it is needed, and hand on the results in the order of the items."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
Started = TypeVar("Started")
Result = TypeVar("Result")


def start_ahead(start: Callable[[Item], Started], items: Iterable[Item], ahead: int) -> Iterator[Started]:
    """Yield ``start(item)`` of each item in order, after also calling ``start`` for the ``ahead`` items that follow.

    Calls ``start`` in the thread that iterates, and takes no more items than it has called ``start`` for.
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
    """Give an iterator of ``function(item)`` of each item in order; at the end of the block, drop what has not begun.

    The block's end does not wait for calls that are running. An exception of ``function`` is raised for its item.

    Args:
        function: called in the threads.
        items: taken one by one in the thread that iterates over the results.
        threads: the number of threads.
        ahead: how many items beyond the one that is waited for may have been started; by default 2 * threads - 1.
        initializer: called in each thread before its first item.
    """
    pool = ThreadPoolExecutor(threads, initializer=initializer)
    number = 2 * threads - 1 if ahead is None else ahead
    try:
        yield (future.result() for future in start_ahead(lambda item: pool.submit(function, item), items, number))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
