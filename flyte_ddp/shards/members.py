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


def choose_image_and_label(sample: str, extensions: Iterable[str]) -> tuple[str, str]:
    """Return the extensions of a sample's image and label, spelled as in ``extensions``.

    Upper and lower case are equal, as in webdataset. If a sample has several images, the first format of ``TRAINED_ON``
    is chosen.

    Args:
        sample: The name of the sample, with which an error's text begins.
        extensions: The extensions of the sample's members.

    Raises:
        UserError: The sample has no image or no label.
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
    """Return the class number in the content of a ``.cls`` file. ``sample`` names the sample in errors.

    Raises:
        UserError: The content is no whole number.
    """
    try:
        return int(content)
    except ValueError:
        raise UserError(f"{sample}: its .cls is {content[:20]!r}; must be a class number") from None


def open_image_lazily(content: bytes) -> Any:
    """Return a PIL image whose pixels are decoded at the first use.

    Raises:
        ValueError: The format is unknown.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(content))
    except UnidentifiedImageError:
        raise ValueError("unknown image format") from None  # Pillow's text shows the BytesIO object


Sample = dict[str, Any]  # bytes or decoded members by extension, and wids' keys such as __key__
DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(IMAGES, open_image_lazily),
    **dict.fromkeys(("cls", "cls2"), int),
    **dict.fromkeys(("txt", "text"), bytes.decode),
    "json": json.loads,
    # Unlike np.load, this function rejects archives of arrays and pickles.
    "npy": lambda content: np.lib.format.read_array(io.BytesIO(content), allow_pickle=False),
}


def decode_sample(sample: Sample) -> Sample:
    """Return a copy of a sample, with each member decoded by its extension.

    Images become PIL images, ``.cls`` and ``.cls2`` int, ``.txt`` and ``.text`` str, ``.json`` Python values, and
    ``.npy`` arrays. Other members are not changed. A truncated image raises Pillow's OSError at its first use. The
    sample must have the keys ``__key__`` and ``__shard__``, which errors name.

    Raises:
        UserError: A member cannot be decoded.
    """
    return {name: decode_member(sample, name, content) for name, content in sample.items()}


def decode_member(sample: Mapping[str, Any], name: str, content: Any) -> Any:
    """Return the decoded ``content`` of a sample's member ``name``, for example ".jpg".

    If no decoder exists for the extension, return ``content``. Errors name ``sample``.

    Raises:
        UserError: The content cannot be decoded.
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
