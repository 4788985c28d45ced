"""Work that is started before it is needed: in order, and no further ahead than it may."""

import threading

import pytest

from flyte_ddp.lookahead import map_in_threads, start_ahead


@pytest.mark.parametrize("ahead", [0, 2, 9])
def test_items_are_started_in_order_and_no_further_ahead_than_allowed(ahead: int) -> None:
    started: list[int] = []
    for place, item in enumerate(start_ahead(lambda item: started.append(item) or item, range(6), ahead)):
        assert item == place
        assert started == list(range(min(6, place + ahead + 1)))


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
