"""Names of classes: UTF-8 texts in Unicode's form NFC."""

import unicodedata
from collections.abc import Iterable

from flyte_ddp.errors import UserError


def class_name(where: str, name: str) -> str:
    """Return the name of a class in Unicode's form NFC, in which macOS and Linux give a folder the same name.

    Args:
        where: the data set, for the error.
        name: a class's name or its folder's name. Python shows bytes of a file name that are not UTF-8 as surrogates.

    Raises:
        UserError: the name is not UTF-8.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: class {name!r} is not UTF-8, as a model's files are; rename it") from None
    return unicodedata.normalize("NFC", name)


def class_names(where: str, names: Iterable[object]) -> tuple[str, ...]:
    """Return the names of classes as texts in Unicode's form NFC, in the given order.

    Raises:
        UserError: a name is not UTF-8, or two names differ that are equal in NFC: they would look alike but have two
            labels.
    """
    given: dict[str, str] = {}  # the first name of each form
    result = []
    for name in map(str, names):
        normal = class_name(where, name)
        if given.setdefault(normal, name) != name:
            raise UserError(
                f"{where}: classes {given[normal]!a} and {name!a} are one name in two of Unicode's forms, and have two "
                "labels; rename one, or make them one class"
            )
        result.append(normal)
    return tuple(result)
