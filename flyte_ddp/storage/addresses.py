"""Split, join and resolve addresses of files, without access to files or network."""

import os
import posixpath
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.text.credentials import refuse_credentials

SCHEMES = ("file", "http", "https", "s3", "gs", "az")


def scheme(address: str) -> str:
    """Return ``file`` (also for a plain path), ``http``, ``https``, ``s3``, ``gs`` or ``az``.

    Raises UserError if the address is of another kind, or contains credentials.
    """
    refuse_credentials("address", address)
    if "://" not in address:
        return "file"
    kind, _, rest = address.partition("://")
    kind = kind.lower()
    if kind not in SCHEMES:
        rule = "must be a path, or start with file://, s3://, gs://, az://, https:// or http://"
        raise UserError(f"address {address!r}: {rule}")
    if kind != "file" and not rest.partition("/")[0]:
        raise UserError(f"address {address!r}: must name a server, bucket or container after {kind}://")
    return kind


def local_path(address: str) -> Path | None:
    """Return the absolute path of a path (also with ``~``) or ``file://`` address, or None for a remote address.

    Raises:
        UserError: The address is of an unknown kind, or contains credentials.
    """
    if scheme(address) != "file":
        return None
    path = Path(unquote(urlsplit(address).path) if "://" in address else address)
    return (path.expanduser() if path.parts[:1] == ("~",) else path).absolute()


def join(folder: str, name: str) -> str:
    """Return the address of a file in a folder or below a prefix. For a web server, the name is percent-encoded."""
    path = local_path(folder)
    return f"{folder.rstrip('/')}/{encode_name(folder, name)}" if path is None else str(path / name)


def encode_name(address: str, name: str) -> str:
    """Return a file name percent-encoded if ``address`` is on a web server, else unchanged."""
    web = "://" in address and scheme(address) in ("http", "https")
    return quote(name.encode("utf-8", "surrogateescape")) if web else name


def parent(address: str) -> str:
    """Return the address of the folder or prefix that contains a file.

    Query and fragment of a web address are removed.
    """
    path = local_path(address)
    if path is not None:
        return str(path.parent)
    if scheme(address) in ("http", "https"):
        parts = urlsplit(address)
        return parts._replace(path=parts.path.rpartition("/")[0], query="", fragment="").geturl()
    start, key = split_key(address)
    return f"{start}{posixpath.dirname(key)}".rstrip("/")


def resolve(base: str, address: str) -> str:
    """Return the absolute form of an address that may be relative to the folder or prefix ``base``.

    A relative address is names joined by "/". The name ".." goes up one folder. A slash at the start leads to the top
    of the machine, server or bucket. The characters "#", "?" and "%" have no special meaning.
    """
    if "://" in address:
        return address
    path = local_path(base)
    if path is not None:
        return os.path.normpath(path / address)
    if scheme(base) in ("http", "https"):
        base = urlsplit(base)._replace(query="", fragment="").geturl()
    start, key = split_key(base)
    names = [] if address.startswith("/") or not key else key.removesuffix("/").split("/")
    for name in address.removeprefix("/").split("/"):
        if name == "..":
            names = names[:-1]
        elif name != ".":
            names.append(encode_name(base, name))
    return f"{start}{'/'.join(names)}"


def split_key(address: str) -> tuple[str, str]:
    """Return an object's address up to and including the slash after the bucket, and the object's key."""
    kind, _, rest = address.partition("://")
    bucket, _, key = rest.partition("/")
    return f"{kind}://{bucket}/", key
