"""Encoded images (JPEG, PNG and others) to pixels: by torchcodec where it is installed, else by Pillow."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


class DecodingError(ValueError):
    """Bytes that are not an image, or not a whole one."""


def decode(content: bytes) -> Tensor:
    """The image as uint8 [3, H, W].

    Raises:
        DecodingError: it is none, or damaged.
    """
    return decoder()(content)


@functools.cache
def decoder() -> Callable[[bytes], Tensor]:
    """The function that decodes."""
    try:
        import torchcodec.decoders  # noqa: F401
    except (ImportError, RuntimeError, OSError):  # not there, or for another version of torch
        return with_pillow
    return with_torchcodec


def with_torchcodec(content: bytes) -> Tensor:
    """:func:`decode` by torchcodec."""
    from torchcodec.decoders import decode_image

    try:
        image: Tensor = decode_image(content, mode="RGB")
    except (RuntimeError, ValueError):
        return with_pillow(content)  # which knows more formats, and better words for what is wrong
    return image if image.dim() == 3 else image[0]  # of an animation the first picture


def with_pillow(content: bytes) -> Tensor:
    """:func:`decode` by Pillow."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content)) as image:
            pixels = np.array(image.convert("RGB"))
    except UnidentifiedImageError:
        raise DecodingError("of no known format") from None
    except (OSError, EOFError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DecodingError(str(error)) from None
    return torch.from_numpy(pixels).permute(2, 0, 1)
