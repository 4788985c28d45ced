"""Drawings of columns whose numbers are almost equal, or unknown."""

from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

from flyte_ddp.monitor.page import draw_distributions

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
