"""Work that is started before it is needed: in order, and no further ahead than it may."""

import threading

import pytest

from flyte_ddp.core.lookahead import map_in_threads


def test_results_of_threads_come_in_order_and_an_error_ends_what_has_not_begun() -> None:
    first_may_end, called = threading.Event(), set[int]()

    def work(item: int) -> int:
        called.add(item)
        if item == 0:
            assert first_may_end.wait(60)
        elif item == 1:
            first_may_end.set()
        elif item == 5:
            raise ValueError("five")
        return item

    results: list[int] = []
    with pytest.raises(ValueError, match="five"), map_in_threads(work, range(1000), 2, ahead=3) as found:
        results.extend(found)
    assert results == [0, 1, 2, 3, 4]
    assert max(called) < 10
