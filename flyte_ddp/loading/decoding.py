"""Encoded images (JPEG, PNG and others) to pixels: by torchcodec where it is installed, else by Pillow."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.pictures import opaque_picture, png_layout, scale_transparent_colour

if TYPE_CHECKING:
    from PIL import Image

Pixels = NDArray[np.uint8]
"""[H, W, 3]."""


ANIMATIONS = ("GIF", "WEBP", "AVIF", "HEIF")
ORIENTATION = 0x0112  # the tag of EXIF
UPRIGHT = 1
TURNS = {  # what makes a picture of another orientation upright, of Pillow's Transpose
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


class DecodingError(ValueError):
    """Bytes that are not an image, or not a whole one."""


def decode(content: bytes) -> Pixels:
    """Return the image in RGB, upright, on white where it is transparent, of 16 bits the upper 8.

    Raises:
        DecodingError: it is none, or damaged, or of floating-point numbers or integers of no known range.
    """
    return decoder()(content)


@functools.cache
def decoder() -> Callable[[bytes], Pixels]:
    """The function that decodes."""
    try:
        import torchcodec.decoders  # noqa: F401
    except (ImportError, RuntimeError, OSError):  # not there, or for another version of torch
        return with_pillow
    return with_torchcodec


def decoder_name() -> str:
    """What it is called."""
    return "torchcodec" if decoder() is with_torchcodec else "Pillow"


def with_torchcodec(content: bytes) -> Pixels:
    """:func:`decode` by torchcodec."""
    import torch
    from torchcodec.decoders import decode_image

    # Pillow reads the header first: it refuses sizes that torchcodec would allocate. Files of many images, of which
    # torchcodec would decode all, and PNGs of 16 bits, which torchcodec scales and rounds, are for Pillow itself.
    with opened(content) as image:
        several = image.format in ANIMATIONS and getattr(image, "is_animated", False)
        deep = png_layout(image).endswith(";16B")
        transparent = image.has_transparency_data
    # Not as bytes, for which torchcodec changes the filters of warnings for a moment: then each warning is shown again,
    # and as threads do this at once, some changes stay, which hide the warnings of others.
    stored = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    try:
        decoded = None if several or deep else decode_image(stored, mode="RGB_ALPHA" if transparent else "RGB")
    except (RuntimeError, ValueError):
        decoded = None
    if decoded is None or decoded.dim() != 3:
        return with_pillow(content)  # which knows more formats, and better words for what is wrong
    pixels: Pixels = decoded.numpy().transpose(1, 2, 0)
    return on_background(pixels) if transparent else pixels


def on_background(pixels: NDArray[np.uint8]) -> Pixels:
    """Return pixels [H, W, 4] with an alpha channel as RGB, composited as Pillow's decoder does."""
    from PIL import Image

    if pixels[..., 3].min() == 255:
        return pixels[..., :3]
    return np.array(opaque_picture(Image.fromarray(np.ascontiguousarray(pixels))).convert("RGB"))


def with_pillow(content: bytes, mode: str = "RGB") -> NDArray[np.uint8]:
    """:func:`decode` by Pillow; [H, W] if the mode is L."""
    from PIL.Image import Transpose

    with opened(content) as image:
        image.load()
        opaque = opaque_picture(image).convert(mode)
        turn = TURNS.get(orientation_of(image))
        return np.array(opaque if turn is None else opaque.transpose(Transpose[turn]))


def orientation_of(image: Image.Image) -> int:
    """Return the orientation that the image's EXIF data say; 1, upright, if they say none or are damaged.

    Pillow's ``exif_transpose`` also writes the EXIF data anew, which fails if any of them is of the wrong kind, and
    looks at XMP, as torchcodec does not. A TIFF is upright when it is loaded.
    """
    from PIL import Image

    notes = Image.Exif()
    try:
        notes.load(image.info.get("exif", b""))
    except SyntaxError:
        return UPRIGHT
    orientation: int = notes.get(ORIENTATION, UPRIGHT)
    return orientation


@contextmanager
def opened(content: bytes) -> Iterator[Image.Image]:
    """An image of which Pillow has read no more than the header.

    Raises:
        DecodingError: it is none, or has more pixels than Pillow's limit; in the block, too, it is damaged.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content)) as image:
            scale_transparent_colour(image)
            yield image
    except UnidentifiedImageError:
        raise DecodingError("of no known format") from None
    except (OSError, EOFError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DecodingError(str(error)) from None
