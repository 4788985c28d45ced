"""A colour for each class of masks, in reports and in the files of predicted masks."""

import colorsys

import numpy as np
from numpy.typing import NDArray

FIRST_COLORS = "#4c566a #2e9e6b #e07b39 #3b6fd4 #c9428c #d9b310 #7a4fc4 #23a5b8 #b5453b #86a02c".split()  # noqa: SIM905


def class_colors(count: int) -> list[str]:
    """Return a colour for each class, such as "#4c566a": chosen ones, then hues by the golden angle."""
    colors = FIRST_COLORS[:count]
    for place in range(len(colors), count):
        hue, lightness = (place * 0.381966) % 1, 0.42 + 0.12 * (place % 3)
        red, green, blue = (round(255 * value) for value in colorsys.hls_to_rgb(hue, lightness, 0.62))
        colors.append(f"#{red:02x}{green:02x}{blue:02x}")
    return colors


def color_table(count: int) -> NDArray[np.uint8]:
    """Return the colours of :func:`class_colors` as uint8 [count, 3]."""
    return np.array([[*bytes.fromhex(color[1:])] for color in class_colors(count)], dtype=np.uint8).reshape(count, 3)
