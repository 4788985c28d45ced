"""Decode the members of a sample by extension. Pickles are not decoded, because they could run code."""

import io
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from flyte_ddp.catalog import IMAGES
from flyte_ddp.core.errors import UserError

LABEL = ".cls"
TRAINED_ON = (*(f".{kind}" for kind in IMAGES), LABEL)  # the extensions that training reads, in lower case
MOST_NAMED = 6  # members of a sample that an error lists


def find_image_and_label(sample: str, extensions: Iterable[str]) -> tuple[str, str]:
    """Return the extensions of a sample's image and label, as written in ``extensions``. Ignores case, like webdataset.

    If a sample has several images, the first format of ``TRAINED_ON`` is chosen.

    Raises:
        UserError: The sample has no image or no label. The text begins with ``sample``.
    """
    found = {extension.lower(): extension for extension in extensions}
    image = next((found[kind] for kind in TRAINED_ON if kind in found and kind != LABEL), None)
    if image is not None and LABEL in found:
        return image, found[LABEL]
    problem = f"has no {'image' if image is None else 'label'}, only {', '.join([*found.values()][:MOST_NAMED])}"
    rule = f"training reads KEY.jpg (or another of {', '.join(IMAGES)}) and KEY{LABEL}, the class number"
    fix = "and a key ends at the first dot of a file name; pack the shard again with such names"
    raise UserError(f"{sample} {problem}; {rule}, {fix}")


def parse_class_number(sample: str, content: bytes) -> int:
    """Return the number in a ``.cls`` member. Raises UserError that begins with ``sample`` if it is no whole number."""
    try:
        return int(content)
    except ValueError:
        raise UserError(f"{sample}: its .cls is {content[:20]!r}; must be a class number") from None


def open_image(content: bytes) -> Any:
    """Return a PIL image that is decoded at first use. Raises ValueError if the format is unknown."""
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(content))
    except UnidentifiedImageError:
        raise ValueError("unknown image format") from None  # Pillow's text shows the BytesIO object


DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(IMAGES, open_image),
    **dict.fromkeys(("cls", "cls2"), int),
    **dict.fromkeys(("txt", "text"), bytes.decode),
    "json": json.loads,
    # Unlike np.load, this function rejects archives of arrays and pickles.
    "npy": lambda content: np.lib.format.read_array(io.BytesIO(content), allow_pickle=False),
}


def decode_sample(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a sample with members decoded by extension. Other members are returned unchanged.

    Images become PIL images, ``.cls`` and ``.cls2`` int, ``.txt`` and ``.text`` str, ``.json`` Python values, and
    ``.npy`` arrays. A truncated image raises Pillow's OSError at its first use. The sample must also have the keys
    ``__key__`` and ``__shard__``, which errors name.

    Raises:
        UserError: A member cannot be decoded.
    """
    return {name: decode_member(sample, name, content) for name, content in sample.items()}


def decode_member(sample: Mapping[str, Any], name: str, content: Any) -> Any:
    """Return one decoded value of a sample, or ``content`` if no decoder exists for ``name``, for example ".jpg".

    Raises:
        UserError: The value cannot be decoded.
    """
    decoder = DECODERS.get(name.rpartition(".")[2].lower()) if name.startswith(".") else None
    if decoder is None:
        return content
    try:
        return decoder(content)
    except Exception as error:  # decoders raise many kinds of errors
        where = f"sample {sample['__key__']!r} in {sample['__shard__']}"
        what = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{where}: {name} cannot be decoded ({what}); fix the sample and pack it again") from None
