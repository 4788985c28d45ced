"""What becomes of a picture's stored values: 8 bits a channel, and white where it is transparent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

BACKGROUND = (255, 255, 255)
BITS_PER_SAMPLE = 258  # TIFF's tag
GREY_LEVELS = {"L;2": 85, "L;4": 17}  # what Pillow multiplies a PNG's greys of so many bits by


def opaque_picture(image: Image.Image) -> Image.Image:
    """Return the picture with 8 bits a channel, composited on BACKGROUND; the same object if it is so already.

    Of 16 bits (or of 12, in TIFF) the upper 8 count. A transparent picture becomes RGBA whose alpha is 255 everywhere.

    Raises:
        ValueError: the pixels are floating-point numbers, or integers that are signed or have 32 bits, whose range
            nothing tells.
    """
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, of no known range; store 8 or 16 bits, without a sign")
    if image.mode.startswith("I"):
        return eight_bit_greys(image)
    if not image.has_transparency_data:
        return image
    from PIL import Image

    canvas = Image.new("RGBA", image.size, BACKGROUND)
    canvas.alpha_composite(image.convert("RGBA"))
    return canvas


def eight_bit_greys(image: Image.Image) -> Image.Image:
    """Return a grey picture of 12 or 16 bits with 8, by their upper ones; BACKGROUND where it is transparent.

    Raises:
        ValueError: its integers are signed or have 32 bits.
    """
    from PIL import Image

    stored: Any = image  # Pillow's classes of formats have more attributes
    if image.mode == "I" and image.format != "PPM":  # whose values Pillow has scaled to 16 bits
        raise ValueError(
            "its pixels are 32-bit or signed integers, of no known range; store 8 or 16 bits, without a sign"
        )
    bits = stored.tag_v2[BITS_PER_SAMPLE][0] if image.format == "TIFF" else 16
    values = np.asarray(image)
    greys = (values >> (bits - 8)).astype(np.uint8)
    if "transparency" in image.info:
        greys[values == image.info["transparency"]] = BACKGROUND[0]
    return Image.fromarray(greys)


def scale_transparent_colour(image: Image.Image) -> None:
    """Scale the transparent colour in the ``info`` of a PNG to 8 bits; other images stay as they are.

    Pillow scales a PNG's pixels when it loads them, but not this colour, so that it finds none of them transparent.
    The picture must not be loaded yet.
    """
    colour, layout = image.info.get("transparency"), png_layout(image)
    if colour is None:
        return
    if layout in GREY_LEVELS:
        image.info["transparency"] = colour * GREY_LEVELS[layout]
    elif layout == "RGB;16B":
        image.info["transparency"] = tuple(value >> 8 for value in colour)


def png_layout(image: Image.Image) -> str:
    """Return what Pillow calls the stored values of a PNG that is not loaded yet, such as RGB;16B; else ""."""
    stored: Any = image
    return str(stored.tile[0].args) if image.format == "PNG" and stored.tile else ""
