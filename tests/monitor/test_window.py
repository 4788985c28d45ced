"""Windows in the registry: which are an alarm, and that none is lost or counted twice."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

import promoter
import pytest

from flyte_ddp.errors import UserError
from flyte_ddp.monitor.window import ColumnChange, Window, is_alarm, read_windows, record_window
from flyte_ddp.release.registry import Entry, Registry


def window(digest: str, *effects: float, by: str = "somebody", address: str = "s3://bucket/in") -> Window:
    """A window whose columns have these effects, and have moved if they are at least 0.1."""
    columns = [ColumnChange(f"column {place}", 0.001, each, each >= 0.1) for place, each in enumerate(effects)]
    return Window("version", address, "2026-11-28T00:00:00Z", by, digest, 100, 0, columns, "accuracy", 0.9)


@pytest.mark.parametrize(
    ("sequence", "expected"),
    [
        ("m", "."),  # the first window after a promotion
        (".mm", "..A"),
        ("mm", ".A"),
        ("m.m", "..A"),
        ("m..m", "...."),
        ("m?m", "..A"),  # too few samples for a verdict
        ("m????m", ".....A"),
        ("mm.", ".A."),  # it has gone by
        ("mm?", ".A."),
        ("m.mm..m", "..AA..."),
        ("..m.m", "....A"),
    ],
)
def test_an_alarm_needs_two_of_the_last_three_windows(sequence: str, expected: str) -> None:
    kinds = {"m": (0.0, 0.3), ".": (0.0, 0.05), "?": ()}
    windows = [window(str(place), *kinds[kind]) for place, kind in enumerate(sequence)]
    found = ["A" if is_alarm(windows[: place + 1]) else "." for place in range(len(windows))]
    assert "".join(found) == expected


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(str(tmp_path / "registry"), "model")


def test_a_window_is_recorded_once_and_begins_anew_with_each_champion(registry: Registry) -> None:
    entry = promoter.append(registry, None)
    first = record_window(registry, entry, window("a", 0.3))
    assert (first.number, first.alarm) == (1, False)
    assert record_window(registry, entry, window("a", 0.3)) == first, "the same samples"
    second = record_window(registry, entry, window("b", 0.3, by="p/d/e"))
    assert (second.number, second.alarm) == (2, True)
    assert second.describe() == "alarm: column 0 (0.30) moved"
    assert record_window(registry, entry, window("c", 0.3, by="p/d/e"), once=True) == second, "a retry"
    late = replace(window("a", 0.3), truths=60, score=0.7)
    assert record_window(registry, entry, late) == replace(first, truths=60, score=0.7), "truth that came later"
    assert read_windows(registry, entry) == [first, second]
    for address, digest in (("s3://bucket/14", "a"), ("s3://bucket/15", "e")):
        other = window(digest, 0.3, by="p/d/e", address=address)
        assert record_window(registry, entry, other, once=True).alarm, "another hour, or another task of the execution"
    assert len(read_windows(registry, entry)) == 4
    later = promoter.append(registry, entry, "another")
    assert not record_window(registry, later, window("d", 0.3)).alarm


def test_a_damaged_record_is_named(registry: Registry) -> None:
    entry = promoter.append(registry, None)
    record_window(registry, entry, window("a"))
    path = Path(registry.at("monitor", f"{entry.number:08}", "00000001.json"))
    for content in ("", "[]", '{"version": 1}', path.read_text()[:-9]):
        path.write_text(content)
        with pytest.raises(UserError, match=r"00000001.json: is damaged; restore or delete it"):
            record_window(registry, entry, window("b"))


def record_many(who: str, registry: Registry, entry: Entry) -> list[int]:
    return [record_window(registry, entry, window(f"{who} {each}", 0.0, by=who)).number for each in range(5)]


@pytest.mark.slow
def test_of_windows_at_the_same_time_none_is_lost(registry: Registry) -> None:
    entry = promoter.append(registry, None)
    with ProcessPoolExecutor(3, get_context("spawn")) as pool:
        numbers = [*pool.map(partial(record_many, registry=registry, entry=entry), "abc")]
    assert sorted(chain.from_iterable(numbers)) == [*range(1, 16)]
    found = read_windows(registry, entry)
    assert {each.digest for each in found} == {f"{who} {number}" for who in "abc" for number in range(5)}
