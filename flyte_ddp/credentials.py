"""User names and passwords in addresses (``https://user:password@host/``), which are refused and never printed.

Addresses are kept and shown in many places: sidecars, run folders, indexes, reports, Flyte's inputs, logs.
"""

import re

from flyte_ddp.errors import UserError

USER_INFO = re.compile(r"(://)[^/?#\s]*@")


def masked(text: str) -> str:
    """Return the text with ``***`` in place of user names and passwords in addresses."""
    return USER_INFO.sub(r"\1***@", text)


def refuse_credentials(name: str, value: str) -> None:
    """Refuse a value that has an address with a user name or a password.

    Args:
        name: what the value is called in the error.
        value: any text.

    Raises:
        UserError: shows the value without them.
    """
    if USER_INFO.search(value):
        raise UserError(
            f"{name}={masked(value)!r}: has a user name or a password, which would be kept and shown wherever the "
            "address is; put them into ~/.netrc, or into the file that NETRC names, and leave them out of the address"
        )
