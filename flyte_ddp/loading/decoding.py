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

Pixels = NDArray[np.uint8]  # [H, W, 3]
ANIMATIONS = ("GIF", "WEBP", "AVIF", "HEIF")
ORIENTATION = 0x0112  # the tag of EXIF
# Pillow's names of what makes a picture of orientation 2 to 8 upright; 1 is upright.
TURNS = "FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"


class DecodingError(ValueError):
    """Bytes that are not an image, or not a whole one."""


def decode(content: bytes) -> Pixels:
    """Return the image in RGB, upright, on white where it is transparent, of 16 bits the upper 8.

    Raises a DecodingError for no image, a damaged one, or numbers of no known range (floating-point, 32 bits, signed).
    """
    return decoder()(content)


@functools.cache
def decoder() -> Callable[[bytes], Pixels]:
    """Return the function that decodes."""
    try:
        import torchcodec.decoders  # noqa: F401
    except (ImportError, RuntimeError, OSError):  # not there, or for another version of torch
        return with_pillow
    return with_torchcodec


def decoder_name() -> str:
    """Return the name of the library that decodes."""
    return "torchcodec" if decoder() is with_torchcodec else "Pillow"


def with_torchcodec(content: bytes) -> Pixels:
    """Decode by torchcodec; see :func:`decode`."""
    import torch
    from PIL import Image
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
    if not transparent:
        return pixels
    if pixels[..., 3].min() == 255:
        return pixels[..., :3]
    return np.array(opaque_picture(Image.fromarray(np.ascontiguousarray(pixels))).convert("RGB"))


def with_pillow(content: bytes, mode: str = "RGB") -> NDArray[np.uint8]:
    """Decode by Pillow, see :func:`decode`, to [H, W] if the mode is L."""
    from PIL.Image import Transpose

    with opened(content) as image:
        image.load()
        opaque, orientation = opaque_picture(image).convert(mode), orientation_of(image)
        return np.array(opaque.transpose(Transpose[TURNS[orientation - 2]]) if 2 <= orientation <= 8 else opaque)


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
        return 1
    orientation: int = notes.get(ORIENTATION, 1)
    return orientation


@contextmanager
def opened(content: bytes) -> Iterator[Image.Image]:
    """Open an image, of which Pillow reads no more than the header; turn Pillow's errors in the block, too.

    Raises a DecodingError for no image, a damaged one, or one of more pixels than Pillow's limit.
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
