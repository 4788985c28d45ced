"""Windows in the registry: which are an alarm, and that none is lost or counted twice."""

import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import promoter
import pytest

from flyte_ddp.core.errors import UserError
from flyte_ddp.monitor.records import Records, read_windows, record_window
from flyte_ddp.monitor.window import ColumnChange, Window, is_alarm
from flyte_ddp.release.promotion_log import Entry
from flyte_ddp.release.registry import Registry


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


@pytest.mark.parametrize(
    ("sequence", "expected"),
    [("w", "."), ("ww", ".A"), ("w.w", "..A"), ("w..w", "...."), ("w??w", "...A"), ("wm", ".."), ("w?.m", "....")],
)
def test_scores_count_apart_from_columns(sequence: str, expected: str) -> None:
    """Of windows with a test of their score: w is worse than held out, . and m (whose columns move) are not."""
    windows = []
    for place, kind in enumerate(sequence):
        each = window(str(place), 0.3 if kind == "m" else 0.0)
        windows.append(each if kind == "?" else replace(each, worse_p=0.5 - 0.499 * (kind == "w"), worse=kind == "w"))
    found = ["A" if is_alarm(windows[: place + 1]) else "." for place in range(len(windows))]
    assert "".join(found) == expected


def test_what_is_worse_and_what_cannot_be_compared_is_said() -> None:
    found = replace(window("a", 0.3, 0.0), measure="average_precision", score=0.034, held_out=0.136, worse=True)
    said = "column 0 (0.30) moved; average precision is 0.034, and was 0.136 on the held-out samples"
    assert found.describe() == f"no alarm yet (an alarm needs 2 of 3 windows): {said}"
    assert replace(found, alarm=True).describe() == f"alarm: {said}"
    columns = [ColumnChange(name, 1.0, 0.0, False, reason) for name, reason in (("a", "all are 0"), ("b", ""))]
    quiet = replace(found, columns=columns, worse=False)
    assert quiet.describe() == "no alarm: no column has moved; cannot be compared: a"


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
    assert record_window(registry, entry, window("c", 0.3, by="p/d/e"), idempotent=True) == second, "a retry"
    assert read_windows(registry, entry) == [first, second]
    for address, digest in (("s3://bucket/14", "a"), ("s3://bucket/15", "e")):
        other = window(digest, 0.3, by="p/d/e", address=address)
        assert record_window(registry, entry, other, idempotent=True).alarm, (
            "another hour, or another task of the execution"
        )
    assert len(read_windows(registry, entry)) == 4
    later = promoter.append(registry, entry, "another")
    assert not record_window(registry, later, window("d", 0.3)).alarm


def test_truth_that_comes_later_is_kept_and_counts(registry: Registry) -> None:
    entry = promoter.append(registry, None)
    first, second = (record_window(registry, entry, window(digest, 0.0)) for digest in "ab")
    some = {"truths": 60, "score": 0.7, "low": 0.6, "high": 0.8, "worse_p": 0.003, "worse": True}
    assert record_window(registry, entry, replace(window("a", 0.0), **some)) == replace(first, **some)
    assert record_window(registry, entry, window("a", 0.0)) == replace(first, **some), "monitored again without a truth"
    alarm = record_window(registry, entry, replace(window("b", 0.0), **some))
    assert alarm == replace(second, **some, alarm=True), "the second one whose score is worse"
    assert read_windows(registry, entry) == [replace(first, **some), alarm]
    better = {**some, "truths": 90, "score": 0.9, "worse_p": 0.5, "worse": False}
    for _ in range(2):
        assert record_window(registry, entry, replace(window("a", 0.0), **better)) == replace(first, **better)
    again = record_window(registry, entry, replace(window("b", 0.0), **{**some, "truths": 99}))
    assert not again.alarm, "the only one, now that more of the truth of the first is known"
    folder = Path(registry.address_of("monitor", f"{entry.number:08}"))
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.json"))
    truths = [f"truth/{name}.json" for name in ("00000001-0001", "00000001-0002", "00000002-0001", "00000002-0002")]
    assert names == ["00000001.json", "00000002.json", *truths]


@pytest.mark.slow
def test_the_same_samples_are_the_same_window_however_many_lie_between(registry: Registry) -> None:
    """Also where digests are missing, as of records that are older than digests, or a writer was killed."""
    entry = promoter.append(registry, None)
    written = [record_window(registry, entry, window(str(number), 0.0)) for number in range(55)]
    records = Path(registry.address_of("monitor", f"{entry.number:08}"))
    digests = sorted((records / "samples").iterdir())
    assert len(digests) == 55
    for lost in ([], digests[3:5], digests):
        for path in lost:
            path.unlink()
        for number in (0, 4, 54):
            assert record_window(registry, entry, window(str(number), 0.3)) == written[number]
        assert sorted((records / "samples").iterdir()) == digests
    assert [each.number for each in read_windows(registry, entry)] == [*range(6, 56)]
    (records / "00000055.json").unlink()
    other = record_window(registry, entry, window("other", 0.0))
    assert other.number == 55, "in place of one that a person has deleted"
    assert record_window(registry, entry, window("other", 0.0)) == other
    assert record_window(registry, entry, window("54", 0.0)).number == 56


KINDS: dict[str, tuple[tuple[float, ...], dict[str, Any]]] = {
    "m": ((0.3,), {}),
    ".": ((0.0,), {}),
    "?": ((), {}),
    "w": ((0.0,), {"worse_p": 0.001, "worse": True}),
    "s": ((), {"worse_p": 0.5}),
    "b": ((0.3,), {"worse_p": 0.001, "worse": True}),
}


def list_kinds(kinds: str) -> list[Window]:
    return [
        replace(window(str(place), *KINDS[kind][0], by=str(place)), **KINDS[kind][1])
        for place, kind in enumerate(kinds)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [
        f"m{'?' * 60}m{'?' * 60}m",
        f"w{'m' * 60}w",
        f"ws{'.' * 55}w{'?' * 55}b",
        *("".join(random.Random(seed).choices("m.?wsb", (1, 4, 4, 1, 1, 1), k=40)) for seed in range(4)),
    ],
)
def test_all_windows_of_a_champion_decide_and_few_are_read(registry: Registry, monkeypatch: Any, kinds: str) -> None:
    entry, windows, read = promoter.append(registry, None), list_kinds(kinds), []
    read_window = Records.read_window

    def note(records: Records, number: int) -> Window:
        read.append(number)
        return read_window(records, number)

    monkeypatch.setattr(Records, "read_window", note)
    for place, each in enumerate(windows):
        read.clear()
        assert record_window(registry, entry, each, idempotent=True).alarm == is_alarm(windows[: place + 1])
        assert len({*read}) == len(read), "each once"
        if not (each.moved or each.worse):
            assert read == [], "it can be no alarm"
        elif each.moved and all(other.columns for other in windows[max(0, place - 2) : place]) and not each.worse:
            assert len(read) == min(2, place)


def test_a_truth_that_comes_later_is_judged_by_the_windows_before_it(registry: Registry) -> None:
    entry = promoter.append(registry, None)
    for each in list_kinds(f"w{'?' * 60}"):
        record_window(registry, entry, each)
    late = {"truths": 60, "score": 0.7, "low": 0.6, "high": 0.8, "worse_p": 0.003, "worse": True}
    assert record_window(registry, entry, replace(list_kinds("?" * 59)[-1], **late)).alarm
    assert not record_window(registry, entry, replace(window("0", 0.0), **late)).alarm, "the first window"


def test_marks_of_before_are_read_and_written_anew(registry: Registry) -> None:
    """Files as they were when a mark had the digest of address and samples alone."""
    entry = promoter.append(registry, None)
    folder = Path(registry.address_of("monitor", f"{entry.number:08}"))
    (folder / "samples").mkdir(parents=True)
    before = [replace(window(digest, 0.3, by=f"p/d/{digest}"), number=at) for at, digest in enumerate("abc", 1)]
    for each in before:
        (folder / f"{each.number:08}.json").write_text(each.to_json(indent=1))
        digest = sha256(f"{each.address}\n{each.digest}".encode()).hexdigest()
        (folder / f"samples/{each.number:08}-{digest}").write_text("\n")
    assert record_window(registry, entry, window("d", 0.0, by="p/d/b"), idempotent=True) == before[1], "a retry"
    assert record_window(registry, entry, window("c", 0.0)) == before[2], "the same samples"
    fourth = record_window(registry, entry, window("d", 0.3))
    assert (fourth.number, fourth.alarm) == (4, True)
    assert read_windows(registry, entry) == [*before, fourth]
    assert len([*(folder / "samples").iterdir()]) == 3 + 4


def test_a_damaged_record_is_named(registry: Registry) -> None:
    entry = promoter.append(registry, None)
    record_window(registry, entry, window("a", 0.3))
    path = Path(registry.address_of("monitor", f"{entry.number:08}", "00000001.json"))
    for content in ("", "[]", '{"version": 1}', path.read_text()[:-9]):
        path.write_text(content)
        with pytest.raises(UserError, match=r"00000001.json: is damaged; restore or delete it"):
            record_window(registry, entry, window("b", 0.3))


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
