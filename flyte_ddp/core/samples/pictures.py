"""Convert pictures to 8 bits a channel, with white in place of transparent pixels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

Pixels = NDArray[np.uint8]  # [H, W, C]
BACKGROUND = (255, 255, 255)
BITS_PER_SAMPLE = 258  # TIFF's tag


def convert_to_opaque_8_bit(image: Image.Image) -> Image.Image:
    """Return a picture with 8 bits a channel, and with white pixels in place of transparent pixels.

    Values of 16 bits keep the upper 8 bits. A picture with transparency becomes RGBA, but 16-bit grey stays grey. If
    nothing changes, returns the same object.

    Raises:
        ValueError: The range of the pixels is unknown (floats, signed integers, or integers of 32 bits).
    """
    problem = "whose range is unknown; store unsigned integers of 8 or 16 bits"
    if image.mode == "F":
        raise ValueError(f"its pixels are floating-point numbers, {problem}")
    from PIL import Image

    if image.mode.startswith("I"):
        stored: Any = image  # Pillow's subclasses for formats have more attributes
        if image.mode == "I" and image.format != "PPM":  # Pillow scales a PPM's values to 16 bits
            raise ValueError(f"its pixels are 32-bit or signed integers, {problem}")
        bits = stored.tag_v2[BITS_PER_SAMPLE][0] if image.format == "TIFF" else 16
        values = np.asarray(image)
        greys = (values >> (bits - 8)).astype(np.uint8)
        if "transparency" in image.info:
            greys[values == image.info["transparency"]] = BACKGROUND[0]
        return Image.fromarray(greys)
    if not image.has_transparency_data:
        return image
    canvas = Image.new("RGBA", image.size, BACKGROUND)
    canvas.alpha_composite(image.convert("RGBA"))
    return canvas


def picture_to_pixels(image: Any) -> NDArray[Any]:
    """Return a PIL image, array or tensor as an array [H, W] or [H, W, C].

    A PIL image becomes grey or RGB uint8, with white in place of transparent pixels. A tensor must be [C, H, W]. Type
    and shape of an array are not checked.

    Raises:
        ValueError: The range of a PIL image's pixels is unknown.
    """
    if hasattr(image, "convert"):
        image = convert_to_opaque_8_bit(image)
        image = image.convert("L" if image.mode in ("1", "L") else "RGB")
    pixels = np.asarray(image)
    return pixels.transpose(1, 2, 0) if hasattr(image, "permute") and pixels.ndim == 3 else pixels


def convert_to_uint8_pixels(what: str, image: Any) -> NDArray[np.uint8]:
    """Return a PIL image, array or tensor as an array uint8 [H, W, C].

    A PIL image becomes grey or RGB, with white in place of transparent pixels. A tensor must be [C, H, W].

    Raises:
        UserError: The image has another type or shape, or pixels of an unknown range. The error begins with ``what``.
    """
    try:
        pixels = picture_to_pixels(image)
    except ValueError as error:
        raise UserError(f"{what} cannot be converted to 8 bits: {error}") from None
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or 0 in pixels.shape:
        rule = "must be a PIL image or uint8, an array [height, width, channels] or a tensor [channels, height, width]"
        fix = "remove transforms such as ToTensor and Normalize, which training applies itself"
        raise UserError(f"{what} is {pixels.dtype} {list(pixels.shape)}; {rule}; {fix}")
    return pixels[..., np.newaxis] if pixels.ndim == 2 else pixels


def get_png_raw_mode(image: Image.Image) -> str:
    """Return Pillow's name of a PNG's stored pixel format: for RGB of 16 bits, "RGB" with the suffix "16B".

    Returns "" for other formats, and for an image that is already loaded.
    """
    stored: Any = image
    return str(stored.tile[0].args) if image.format == "PNG" and stored.tile else ""
