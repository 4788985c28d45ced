"""Reject and mask user names and passwords in addresses, because addresses are stored and shown in many places."""

import re

from flyte_ddp.core.errors import UserError

USER_INFO = re.compile(r"(://)[^/?#\s]*@")
# The start of an address and its server or bucket. Wrong numbers of slashes, and backslashes, also match.
START = re.compile(r"([a-z][a-z0-9+]*):(?:(?<!file:)[/\\]+|[/\\]{1,2})([^/?#\s\"']*)", re.IGNORECASE)
PORT = re.compile(r"(\[[^]]*\]|[^:]*)(:[0-9]*)?\W*")  # a server, its port, and punctuation that may follow in a text
BUCKETS = ("s3", "gs", "az")


def mask_credentials(text: str) -> str:
    """Return a text with ``***`` in place of user names and passwords in addresses."""
    return USER_INFO.sub(r"\1***@", text)


def check_no_credentials(name: str, value: str) -> None:
    """Raise a UserError if an address in ``value`` has a user name or a password.

    Also rejects a colon that no port follows, because a password may contain "/" or "?". The error begins with
    ``name``, and shows ``value`` without the secret.
    """
    for found in START.finditer(value):
        kind, server = found.groups()
        colon = ":" in server.rstrip(":") if kind.lower() in BUCKETS else not PORT.fullmatch(server)
        if "@" in server or colon:
            place = found.start(2)
            rest = "@" + value.rpartition("@")[2] if "@" in value[place:] else ""
            raise UserError(
                f"{name}={value[:place] + '***' + rest!r}: has a user name or a password, which would be stored and "
                "shown with the address; put them into ~/.netrc, or into the file that NETRC names"
            )
