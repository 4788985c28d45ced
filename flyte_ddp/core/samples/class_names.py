"""Class names as UTF-8 texts in Unicode's form NFC."""

import unicodedata
from collections.abc import Iterable

from flyte_ddp.core.errors import UserError


def normalize_class_names(dataset: str, names: Iterable[object]) -> tuple[str, ...]:
    """Return class names as texts in Unicode's form NFC. Names of another type are converted by ``str``.

    Raises:
        UserError: A name is not UTF-8, or two names become equal. The error begins with ``dataset``.
    """
    given: dict[str, str] = {}  # the first name of each form
    for name in map(str, names):
        try:
            name.encode()
        except UnicodeEncodeError:  # Python shows bytes of a file name that are not UTF-8 as surrogates
            raise UserError(f"{dataset}: class {name!r} is not UTF-8, which a model's files need; rename it") from None
        normal = unicodedata.normalize("NFC", name)
        if normal in given:
            raise UserError(
                f"{dataset}: classes {given[normal]!a} and {name!a} are equal in Unicode form NFC; rename one of them"
            )
        given[normal] = name
    return tuple(given)
