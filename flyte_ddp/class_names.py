"""Names of classes: text that every file of a run can hold, in one of Unicode's forms."""

import unicodedata
from collections.abc import Iterable

from flyte_ddp.errors import UserError


def class_name(where: str, name: str) -> str:
    """Return the name in Unicode's form NFC, in which macOS's and Linux's names of one folder are equal.

    Args:
        where: what has the class, for the error.
        name: of the class, or of its folder, whose bytes that are no UTF-8 are surrogates in Python.

    Raises:
        UserError: it is not UTF-8.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: class {name!r} is not UTF-8, as a model's files are; rename it") from None
    return unicodedata.normalize("NFC", name)


def class_names(where: str, names: Iterable[object]) -> tuple[str, ...]:
    """Return the names as text, each by :func:`class_name`, in their order.

    Raises:
        UserError: one is not UTF-8, or two that differ are one in NFC: they look alike, and have two labels.
    """
    given: dict[str, str] = {}  # the first name of each form
    made = []
    for name in map(str, names):
        normal = class_name(where, name)
        if given.setdefault(normal, name) != name:
            raise UserError(
                f"{where}: classes {given[normal]!a} and {name!a} are one name in two of Unicode's forms, and have two "
                "labels; rename one, or make them one class"
            )
        made.append(normal)
    return tuple(made)
