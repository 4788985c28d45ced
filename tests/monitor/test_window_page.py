"""The page of a window: its alarm, its samples, and drawings of columns with equal or unknown numbers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from report_page import Page

from flyte_ddp.monitor.course import draw_window_history
from flyte_ddp.monitor.page import describe_new_categories, draw_distributions, pool_new_categories, write_window_page
from flyte_ddp.monitor.watch import WatchedModel
from flyte_ddp.monitor.window import ColumnChange, Window
from flyte_ddp.report.figures import BLUE, Picture, Series, draw_line_chart

WINDOW = Window(
    version="1" * 64,
    address="week.csv",
    time="2026-11-28T07:05:00Z",
    by="somebody",
    digest="",
    samples=60,
    bad=0,
    columns=[ColumnChange("input age", 0.0, 0.5, True), ColumnChange("input income", 0.25, 0.04, False)],
    measure="accuracy",
    held_out=0.9,
    number=2,
)
NORMAL = np.random.default_rng(0).normal(size=600)


@pytest.mark.parametrize(
    ("reference", "window"),
    [
        (np.where(np.arange(6000) < 25, np.arange(6000.0), 1e17), np.full(60, 1e17)),
        (np.where(np.arange(6000) < 25, np.arange(6000.0), 0.0), np.zeros(60)),
    ],
)
def test_almost_equal_numbers_are_drawn(reference: np.ndarray, window: np.ndarray) -> None:
    assert draw_distributions("x", reference, window).count("<path") > 4


@pytest.mark.parametrize("name", ["$0_$50", "$50_$100", "$0-$50", "$x_{$", r"\\alpha $\\frac$"])
def test_dollar_signs_in_names_are_drawn_as_they_are(name: str) -> None:
    """They are prices, and no mathematics, in categories, axes and legends."""
    drawn = draw_distributions(name, np.array([name] * 50 + ["x"] * 50), np.array(["x"] * 100))
    assert f">{name}</text>" in drawn
    assert f">{name[:14]}</text>" in drawn
    line = Series(name, [1, 2], [1.0, 2.0], BLUE)
    assert f">{name}</text>" in draw_line_chart([line], x_label="step", y_label="loss")


def test_unknown_numbers_are_drawn_at_the_right_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the test counts them: beyond all others."""
    drawn, stairs = list[np.ndarray](), Axes.stairs

    def draw(axes: Axes, values: np.ndarray, *given: Any, **named: Any) -> Any:
        drawn.append(values)
        return stairs(axes, values, *given, **named)

    monkeypatch.setattr(Axes, "stairs", draw)
    draw_distributions("x", NORMAL, np.where(np.arange(600) < 180, np.nan, NORMAL))
    assert [each.sum() for each in drawn] == pytest.approx([1, 1])
    assert drawn[1][-1] >= 0.3


def draw_page(window: Window, folder: Path) -> Page:
    columns = {"input age": NORMAL, "input income": NORMAL}
    watched = WatchedModel(None, columns, columns=columns)  # type: ignore[arg-type]  # no page needs the model
    values = {"input income": "2,000", "input 7": "0.5", "input age": "41"}
    watched.unusual = [(1.0, Picture("C-1", None, "stays", "churns", score=0.75, values=values))]
    return Page(write_window_page(window, watched, [window], "churn", folder / "window.html").read_text())


def test_an_alarm_looks_like_one_and_says_what_to_do(tmp_path: Path) -> None:
    page = draw_page(replace(WINDOW, alarm=True), tmp_path)
    assert page.texts("h1") == ["churn: Alarm"]
    [head] = page.texts("div", class_="head bad")
    assert "What to do" in head
    assert "release_wf --model_name churn" in head
    assert ["input age", "0.500", "< 0.0001", "yes"] in page.rows()
    quiet = draw_page(WINDOW, tmp_path)
    assert quiet.texts("h1") == ["churn: No alarm"]
    assert "What to do" not in quiet.texts("div", class_="head doubtful")[0]
    assert draw_page(replace(WINDOW, columns=[]), tmp_path).texts("h1") == ["churn: No verdict"]


def test_unusual_rows_have_their_values_what_moved_first(tmp_path: Path) -> None:
    page = draw_page(WINDOW, tmp_path)
    assert ["Sample", "Prediction", "Truth", "Score", "age", "income", "input 7"] in page.rows()
    assert ["C-1", "stays", "churns", "75.00\N{NO-BREAK SPACE}%", "41", "2,000", "0.5"] in page.rows()


def test_a_window_is_printed_in_a_line() -> None:
    assert repr(WINDOW) == "<window 2, no alarm yet (an alarm needs 2 of 3 windows): input age (0.50) moved>"


def test_categories_that_the_reference_does_not_have_are_drawn_as_one() -> None:
    reference, window = np.array([*"aabbb"]), np.array([*"abccd"])
    values, counts = np.array([*"abcd"]), np.array([[2, 3, 0, 0], [1, 1, 2, 1]])
    labels, pooled = pool_new_categories(values, counts)
    assert labels == ["a", "b", "(new)"]
    assert pooled.tolist() == [[2, 3, 0], [1, 1, 3]]
    assert "(new)" in draw_distributions("x", reference, window)
    assert describe_new_categories(reference, window) == ": new values c, d"
    assert "(new)" not in draw_distributions("x", reference, reference)
    assert describe_new_categories(reference, reference) == describe_new_categories(NORMAL, NORMAL + 9) == ""


def test_the_course_has_a_point_for_each_window(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = dict[str, list[Any]]()
    for name in ("plot", "vlines", "bar", "axhline"):
        original = getattr(Axes, name)

        def draw(axes: Axes, *given: Any, original: Any = original, name: str = name, **named: Any) -> Any:
            drawn.setdefault(name, []).append(given)
            return original(axes, *given, **named)

        monkeypatch.setattr(Axes, name, draw)

    def window(number: int, moved: int, score: float | None = None, **values: Any) -> Window:
        columns = [ColumnChange(str(place), 0.5, 0.5, place < moved) for place in range(5)]
        given = ("v", "in", "2026-11-28T00:00:00Z", "me", str(number), 100, 0, columns, "average_precision", 0.136)
        return Window(*given, score=score, number=number, **values)

    assert draw_window_history([window(1, 3, 0.1)]) == []
    assert [title for title, _ in draw_window_history([window(1, 3, 0.1), window(2, 0)])] == ["Columns that moved"]
    drawn.clear()
    worse = {"worse_p": 0.003, "worse": True, "low": 0.01, "high": 0.05}
    course = [window(1, 0, 0.14), window(2, 3), window(3, 4, 0.034, alarm=True, **worse)]
    charts = draw_window_history(course)
    assert [title for title, _ in charts] == ["Average precision", "Columns that moved"]
    assert all(chart.startswith("<svg") for _, chart in charts)
    assert drawn["axhline"][0] == (0.136,)
    assert [[*map(list, given[:2])] for given in drawn["plot"]] == [[[1, 3], [0.14, 0.034]], [[3], [0.034]]]
    assert [*map(list, drawn["vlines"][0])] == [[3], [0.01], [0.05]]
    assert [[*map(list, given)] for given in drawn["bar"]] == [[[1, 2], [0, 3]], [[3], [4]]]
