"""Refuse and mask user names and passwords in addresses, which are stored and shown in many places."""

import re

from flyte_ddp.errors import UserError

USER_INFO = re.compile(r"(://)[^/?#\s]*@")


def mask_credentials(text: str) -> str:
    """Return a text with ``***`` in place of the user names and passwords of its addresses."""
    return USER_INFO.sub(r"\1***@", text)


def refuse_credentials(name: str, value: str) -> None:
    if USER_INFO.search(value):
        raise UserError(
            f"{name}={mask_credentials(value)!r}: has a user name or a password, which would be kept and shown "
            "wherever the address is; put them into ~/.netrc, or into the file that NETRC names"
        )
