"""Names of classes: UTF-8 texts in Unicode's form NFC."""

import unicodedata
from collections.abc import Iterable

from flyte_ddp.errors import UserError


def normalize_class_name(dataset: str, name: str) -> str:
    """Return a class's name in Unicode's form NFC, in which macOS and Linux give a folder the same name."""
    try:
        name.encode()
    except UnicodeEncodeError:  # Python shows bytes of a file name that are not UTF-8 as surrogates
        raise UserError(f"{dataset}: class {name!r} is not UTF-8, as a model's files are; rename it") from None
    return unicodedata.normalize("NFC", name)


def normalize_class_names(dataset: str, names: Iterable[object]) -> tuple[str, ...]:
    """Return classes' names in form NFC; UserError if two names that look alike become equal."""
    given: dict[str, str] = {}  # the first name of each form
    result = []
    for name in map(str, names):
        normal = normalize_class_name(dataset, name)
        if given.setdefault(normal, name) != name:
            raise UserError(
                f"{dataset}: classes {given[normal]!a} and {name!a} are one name in two of Unicode's forms, and have "
                "two labels; rename one, or make them one class"
            )
        result.append(normal)
    return tuple(result)
