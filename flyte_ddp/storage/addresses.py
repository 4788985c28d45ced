"""Addresses of files: their kinds, and putting them together."""

import os
import posixpath
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from flyte_ddp.credentials import refuse_credentials
from flyte_ddp.errors import UserError

SCHEMES = ("file", "http", "https", "s3", "gs", "az")


def scheme(address: str) -> str:
    """Return ``file`` (also for plain paths), ``http``, ``https``, ``s3``, ``gs`` or ``az``.

    Raises:
        UserError: any other scheme, no server or bucket after it, or a user name or password before that.
    """
    refuse_credentials("address", address)
    found = address.partition("://")[0].lower() if "://" in address else "file"
    if found not in SCHEMES:
        raise UserError(
            f"address {address!r}: must be a path, or start with file://, s3://, gs://, az://, https:// or http://"
        )
    if found != "file" and not address.partition("://")[2].partition("/")[0]:
        named = {"s3": "bucket", "gs": "bucket", "az": "container"}.get(found, "server")
        raise UserError(f"address {address!r}: must name a {named} after {found}://")
    return found


def local_path(address: str) -> Path | None:
    """Return the absolute path that a plain path or a ``file://`` address means; None for a remote address."""
    if scheme(address) != "file":
        return None
    path = Path(unquote(urlsplit(address).path) if "://" in address else address)
    return (path.expanduser() if path.parts[:1] == ("~",) else path).absolute()


def join(source: str, name: str) -> str:
    """Return the address of the file ``name`` in the folder ``source``."""
    path = local_path(source)
    return f"{source.rstrip('/')}/{as_in(source, name)}" if path is None else str(path / name)


def as_in(address: str, name: str) -> str:
    """Return a file's name as it stands in an address of that kind: in one of HTTP percent-encoded."""
    web = "://" in address and scheme(address) in ("http", "https")
    return quote(name.encode("utf-8", "surrogateescape")) if web else name


def parent(address: str) -> str:
    """Return the address of the folder that a file is in."""
    path = local_path(address)
    if path is not None:
        return str(path.parent)
    if scheme(address) in ("http", "https"):
        parts = urlsplit(address)
        return parts._replace(path=parts.path.rpartition("/")[0], query="", fragment="").geturl()
    start, key = split_key(address)
    return f"{start}{posixpath.dirname(key)}".rstrip("/")


def resolve(base: str, address: str) -> str:
    """Return the absolute address of ``address``, which may be relative to the folder ``base``.

    A relative one is made of plain names of files, in which "#", "?" and "%" stand for themselves, on any storage.
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
            names.append(as_in(base, name))
    return f"{start}{'/'.join(names)}"


def leads_out(name: str) -> bool:
    """Return whether the name of a file in a list leads out of the listed folder."""
    return name.startswith("/") or ".." in name.split("/")


def split_key(address: str) -> tuple[str, str]:
    """Return an object's address up to its bucket, with the slash after it, and its key of any characters."""
    kind, _, rest = address.partition("://")
    bucket, _, key = rest.partition("/")
    return f"{kind}://{bucket}/", key
