"""Names of classes: UTF-8 texts in Unicode's form NFC."""

import unicodedata
from collections.abc import Iterable

from flyte_ddp.errors import UserError


def normalize_class_names(dataset: str, names: Iterable[object]) -> tuple[str, ...]:
    """Return class names in Unicode's form NFC, as macOS and Linux agree on; UserError for one that is not UTF-8."""
    texts = tuple(map(str, names))
    for name in texts:
        try:
            name.encode()
        except UnicodeEncodeError:  # Python shows bytes of a file name that are not UTF-8 as surrogates
            raise UserError(f"{dataset}: class {name!r} is not UTF-8, as a model's files are; rename it") from None
    return tuple(unicodedata.normalize("NFC", name) for name in texts)
