"""The report's pictures and figures by themselves."""

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image
from report_page import Page

from flyte_ddp import formatting
from flyte_ddp.report import figures, page
from flyte_ddp.report.figures import Series


@pytest.mark.parametrize("shape", [(300, 200, 3), (40, 40, 4), (1, 1, 1), (64, 64, 2)])
def test_thumbnails_of_any_image_fit_their_place(shape: tuple[int, int, int]) -> None:
    uri = page.thumbnail(np.zeros(shape, dtype=np.uint8))
    picture = Image.open(io.BytesIO(base64.b64decode(uri.removeprefix("data:image/png;base64,"))))
    assert max(picture.size) in range(57, 113)


def test_a_thinned_line_keeps_the_mean_and_the_extremes() -> None:
    values = np.random.default_rng(0).normal(size=5003)
    steps = np.arange(5003.0)
    x, low, mean, high = figures.thin_series(steps, values)
    assert len(x) == figures.MAX_POINTS
    edges = np.searchsorted(steps, x)  # the mean x of a run lies inside it
    for k in (0, 150, 299):
        run = values[int(k * 5003 / 300) : int((k + 1) * 5003 / 300)]
        assert (low[k], high[k]) == (run.min(), run.max())
        assert mean[k] == pytest.approx(run.mean())
    assert np.all(np.diff(edges) > 0)


def test_a_line_goes_through_the_values() -> None:
    svg = figures.draw_line_chart([Series("", [0, 1, 2], [10.0, 30.0, 20.0], "#123456")], x_label="x", y_label="y")
    path = next(line for line in re.findall(r'<path d="([^"]*)"[^>]*stroke: #123456', svg))
    points = np.array([[float(number) for number in pair.split()] for pair in re.findall(r"[ML] ([\d. ]+)", path)])
    heights = points[:3, 1]
    assert (heights[0] - heights[2]) / (heights[0] - heights[1]) == pytest.approx(0.5, abs=1e-4)
    assert (points[1, 0] - points[0, 0]) == pytest.approx(points[2, 0] - points[1, 0], abs=1e-4)


@pytest.mark.parametrize("scale", ["linear", "from 0", "log"])
@pytest.mark.parametrize(
    "values", [[float("nan"), 1.0], [float("nan")], [0.0, 100.0], [1e-9, 1e9], [float("inf"), 1.0]]
)
def test_odd_values_can_be_drawn(values: list[float], scale: str) -> None:
    line = Series("loss", list(range(len(values))), values, figures.BLUE)
    Page(figures.draw_line_chart([line], x_label="step", y_label="loss", scale=scale))


def test_durations_are_given_in_units_that_suit_them() -> None:
    expected = {0.0404: "40 ms", 9.876: "9.88 s", 59.9: "59.9 s", 60: "1 min 00 s", 3599: "59 min 59 s"}
    expected |= {3600: "1 h 00 min", 90_061: "25 h 01 min"}
    assert {seconds: formatting.format_duration(seconds) for seconds in expected} == expected
