"""What the members of a sample mean, by their extensions. No code is run that data could bring along: no pickles."""

import io
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flyte_ddp.catalog import IMAGES
from flyte_ddp.errors import UserError

LABEL = ".cls"
TRAINED_ON = (*(f".{kind}" for kind in IMAGES), LABEL)  # the extensions that training reads, in small letters
MOST_NAMED = 6  # members of a sample in an error


def image_and_label(sample: str, extensions: Iterable[str]) -> tuple[str, str]:
    """Return the extensions of the members that training reads of a sample: its image and its label.

    Upper and lower case are the same, as in webdataset. Of several images the one whose kind comes first in
    ``TRAINED_ON`` is read.

    Args:
        sample: what the sample is called in a sentence.
        extensions: those of all members of the sample, each with its dot.

    Raises:
        UserError: there is no image or no label.
    """
    found = {extension.lower(): extension for extension in extensions}
    image = next((found[kind] for kind in TRAINED_ON if kind in found and kind != LABEL), None)
    if image is not None and LABEL in found:
        return image, found[LABEL]
    names = [*found.values()]
    named = ", ".join(names[:MOST_NAMED])
    named += f" and {len(names) - MOST_NAMED} others" if len(names) > MOST_NAMED else ""
    first, *others, _ = TRAINED_ON
    raise UserError(
        f"{sample} has no {'image' if image is None else 'label'}: it has {named}; training reads KEY{first} (or "
        f"{', '.join(others)}) and KEY{LABEL}, the number of the class, and a key ends at the first dot of a file's "
        "name; pack the shard again with such names"
    )


def class_number(sample: str, content: bytes) -> int:
    """Return the number in a ``.cls`` member; raise UserError, with the sample's name in a sentence, if it is none."""
    try:
        return int(content)
    except ValueError:
        raise UserError(f"{sample}: its .cls is {content[:20]!r}; must be the number of a class") from None


def open_image(content: bytes) -> Any:
    """Return a PIL image, not yet decoded."""
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(content))
    except UnidentifiedImageError:
        raise ValueError("an image of no known format") from None


def decode_array(content: bytes) -> Any:
    """Return a numpy array; without ``np.load``, which would take an archive of arrays, too."""
    import numpy as np

    return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)


DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(IMAGES, open_image),
    **dict.fromkeys(("cls", "cls2"), int),
    **dict.fromkeys(("txt", "text"), bytes.decode),
    "json": json.loads,
    "npy": decode_array,
}


def is_image(extension: str) -> bool:
    """Return whether a member with this extension is an image: as in wids, of ``.seg.png`` the last part counts."""
    return extension.rpartition(".")[2].lower() in IMAGES


def decode_sample(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample with images as PIL images, ``.cls`` as int, ``.txt`` as text, ``.json`` and ``.npy`` as values.

    Members with another extension stay bytes. As in wids, of ``.seg.png`` the last part counts. Raises UserError if a
    member is not what its extension says.
    """
    return {name: decode_member(sample, name, content) for name, content in sample.items()}


def decode_member(sample: Mapping[str, Any], name: str, content: Any) -> Any:
    """Return the decoded value of a sample's member; a value under a key of wids (``__index__``) is left as it is.

    ``sample`` has ``__key__`` and ``__shard__``, for the error; ``name`` is the member's extension.
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
