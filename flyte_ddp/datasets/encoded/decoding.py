"""Decode images (JPEG, PNG and others) to pixels, with simplejpeg and torchcodec if installed, else with Pillow."""

import functools
import importlib
import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from flyte_ddp.core.samples.pictures import Pixels, convert_to_opaque_8_bit, get_png_raw_mode

JPEG = b"\xff\xd8\xff"  # first bytes of a file
APP1, SOS = 0xFFE1, 0xFFDA  # markers in a JPEG: EXIF data, and the start of a scan, which ends the header
SAME_RGB = ("YCbCr", "RGB", "Gray")  # stored colours that all decoders convert alike, by simplejpeg's names
ANIMATIONS = ("GIF", "WEBP", "AVIF", "HEIF")  # formats that can hold many images
ORIENTATION = 0x0112  # tag in EXIF data
# Pillow's transpositions that turn images of EXIF orientation 2 to 8 upright; orientation 1 is upright.
TURNS = "FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"


class DecodingError(ValueError):
    """The bytes are not an image, or the image is damaged or truncated."""


def decode_image(content: bytes) -> Pixels:
    """Decode an image file to upright RGB pixels.

    Transparent parts become white, and 16-bit values keep their upper 8 bits. Most JPEGs are decoded by simplejpeg and
    other images by torchcodec if installed, else by Pillow.

    Raises:
        DecodingError: The bytes are no image, or the image is damaged or has more than twice Pillow's limit of pixels.
            Pixels of floating-point, 32-bit or signed types are rejected, because their range is unknown.
    """
    if content.startswith(JPEG) and can_import("simplejpeg") and (pixels := decode_plain_jpeg(content)) is not None:
        return pixels
    return decode_with_torchcodec(content) if can_import("torchcodec.decoders") else decode_with_pillow(content)


@functools.cache
def can_import(module: str) -> bool:
    """Return whether a module can be imported. Imports the module at the first call, and keeps the answer."""
    try:
        importlib.import_module(module)
    except (ImportError, RuntimeError, OSError):  # not installed, or built for another version of torch
        return False
    return True


def decode_plain_jpeg(content: bytes) -> Pixels | None:
    """Decode an upright, undamaged JPEG in RGB, YCbCr or grey with simplejpeg.

    Returns None for all other images, and for images above Pillow's limit of pixels. Then use another decoder.
    """
    import simplejpeg

    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
        if colours not in SAME_RGB or height * width > (Image.MAX_IMAGE_PIXELS or 0) or not is_upright(content):
            return None
        pixels: Pixels = simplejpeg.decode_jpeg(content)
    except (ValueError, KeyError):  # KeyError: unusual subsampling, for which simplejpeg has no name
        return None
    return pixels


def is_upright(content: bytes) -> bool:
    """Return True if no EXIF data of a JPEG turn or mirror the image.

    In doubt returns False, for example for fill bytes, a marker without a length, or an incomplete header.
    """
    position = 2
    while position + 4 <= len(content):
        marker, length = struct.unpack_from(">HH", content, position)
        if marker == SOS:
            return True
        if marker == APP1:  # torchcodec reads the first APP1 segment, whatever its first six bytes are
            exif = memoryview(content)[position + 10 : position + 2 + length]
            if any(read_orientation(exif, order) != 1 for order in "<>"):
                return False
        if not 0xFFC0 <= marker < 0xFFD0 and not SOS <= marker < 0xFFFF:  # fill bytes, or a marker without a length
            return False
        position += 2 + length
    return False


def is_exif_first(content: bytes) -> bool:
    """Return whether the first APP1 segment of a JPEG holds EXIF data."""
    return content[content.find(APP1.to_bytes(2)) + 4 :].startswith(b"Exif\0\0")


def decode_with_torchcodec(content: bytes) -> Pixels:
    """Decode an image to upright RGB pixels with torchcodec, or with Pillow if torchcodec fails.

    Pillow also decodes animations, 16-bit PNGs, and JPEGs whose EXIF data torchcodec would overlook.

    Raises:
        DecodingError: Pillow rejects the image.
    """
    from torchcodec import decoders

    # Pillow reads the header first, because torchcodec would allocate huge sizes, which Pillow rejects. Pillow also
    # decodes animations (torchcodec would decode every frame) and 16-bit PNGs (torchcodec would round the values).
    with open_with_pillow(content) as image:
        animated = image.format in ANIMATIONS and getattr(image, "is_animated", False)
        for_pillow = animated or get_png_raw_mode(image).endswith(";16B")
        # torchcodec looks for EXIF data in the first APP1 segment only, which may hold XMP data.
        for_pillow |= exif_orientation(image) != 1 and content.startswith(JPEG) and not is_exif_first(content)
        transparent = image.has_transparency_data
    # Given bytes, torchcodec changes the global warning filters for a moment. Threads that do this at the same time can
    # leave the filters changed. Given a tensor, torchcodec leaves the filters alone.
    stored = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    try:
        decoded = None if for_pillow else decoders.decode_image(stored, mode="RGB_ALPHA" if transparent else "RGB")
    except (RuntimeError, ValueError):
        decoded = None
    if decoded is None or decoded.dim() != 3:
        return decode_with_pillow(content)  # Pillow knows more formats, and its errors are clearer
    pixels: Pixels = decoded.numpy().transpose(1, 2, 0)
    if not transparent:
        return pixels
    if pixels[..., 3].min() == 255:  # opaque everywhere
        return pixels[..., :3]
    return np.array(convert_to_opaque_8_bit(Image.fromarray(np.ascontiguousarray(pixels))).convert("RGB"))


def decode_with_pillow(content: bytes, mode: str = "RGB") -> NDArray[np.uint8]:
    """Decode an image with Pillow to upright pixels in one of Pillow's modes. Raises DecodingError if Pillow fails."""
    with open_with_pillow(content) as image:
        image.load()
        opaque, orientation = convert_to_opaque_8_bit(image).convert(mode), exif_orientation(image)
        return np.array(opaque.transpose(Image.Transpose[TURNS[orientation - 2]]) if 2 <= orientation <= 8 else opaque)


def exif_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of an image, normally 1 to 8.

    Returns 1 (upright) if the orientation is missing or damaged.
    """
    exif = image.info.get("exif", b"").removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    return read_orientation(exif, order) if order else 1


def read_orientation(exif: bytes | memoryview, order: str) -> int:
    """Return the orientation in EXIF data, or 1 (upright) if the orientation is missing or damaged.

    ``exif`` begins with the TIFF header. ``order`` is the byte order, "<" or ">".
    """
    # As torchcodec, reads 16 bits whatever the entry's type, and ignores XMP. Pillow's exif_transpose differs.
    try:
        (start,) = struct.unpack_from(f"{order}I", exif, 4)
        (entries,) = struct.unpack_from(f"{order}H", exif, start)
        for entry in range(entries):
            tag, value = struct.unpack_from(f"{order}H6xH", exif, start + 2 + 12 * entry)
            if tag == ORIENTATION:
                return int(value)
    except struct.error:
        pass
    return 1


@contextmanager
def open_with_pillow(content: bytes) -> Iterator[Image.Image]:
    """Yield an image of which only the header is read. The image is closed after the block.

    Raises:
        DecodingError: Pillow does not know the format, or rejects the number of pixels. Also raised in place of an
            OSError, EOFError, ValueError or SyntaxError of the block.
    """
    try:
        with Image.open(io.BytesIO(content)) as image:
            yield image
    except UnidentifiedImageError:
        raise DecodingError("unknown image format") from None
    except (OSError, EOFError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DecodingError(str(error)) from None
