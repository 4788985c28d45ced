"""Split, join and resolve addresses of files, without access to files or network."""

import os
import posixpath
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.text.credentials import check_no_credentials

SCHEMES = ("file", "http", "https", "s3", "gs", "az")


def parse_scheme(address: str) -> str:
    """Return the kind of an address: ``file`` (also for a plain path), ``http``, ``https``, ``s3``, ``gs`` or ``az``.

    Raises:
        UserError: The address is of another kind, or contains credentials.
    """
    check_no_credentials("address", address)
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


def find_local_path(address: str) -> Path | None:
    """Return the absolute path of an address on this machine, or None for a remote address.

    The address is a path, which may begin with ``~``, or begins with ``file://``.

    Raises:
        UserError: The address is of an unknown kind, or contains credentials.
    """
    if parse_scheme(address) != "file":
        return None
    path = Path(unquote(urlsplit(address).path) if "://" in address else address)
    return (path.expanduser() if path.parts[:1] == ("~",) else path).absolute()


def join_address(folder: str, name: str) -> str:
    """Return the address of the file ``name`` in a folder or below a prefix.

    If the folder is on a web server, the name is percent-encoded.
    """
    path = find_local_path(folder)
    return f"{folder.rstrip('/')}/{encode_name(folder, name)}" if path is None else str(path / name)


def encode_name(address: str, name: str) -> str:
    """Return a file name, percent-encoded if ``address`` is on a web server."""
    web = "://" in address and parse_scheme(address) in ("http", "https")
    return quote(name.encode("utf-8", "surrogateescape")) if web else name


def parent_address(address: str) -> str:
    """Return the address of the folder or prefix that contains the file at ``address``.

    Query and fragment of a web address are removed.
    """
    path = find_local_path(address)
    if path is not None:
        return str(path.parent)
    if parse_scheme(address) in ("http", "https"):
        parts = urlsplit(address)
        return parts._replace(path=parts.path.rpartition("/")[0], query="", fragment="").geturl()
    start, key = split_key(address)
    return f"{start}{posixpath.dirname(key)}".rstrip("/")


def resolve_address(base: str, address: str) -> str:
    """Return the absolute form of an address. A relative address starts at the folder or prefix ``base``.

    A relative address is names joined by "/". The name ".." goes up one folder. A slash at the start leads to the top
    of the machine, server or bucket. The characters "#", "?" and "%" have no special meaning.
    """
    if "://" in address:
        return address
    path = find_local_path(base)
    if path is not None:
        return os.path.normpath(path / address)
    if parse_scheme(base) in ("http", "https"):
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
    """Split an object's address into the bucket's address, which ends with a slash, and the object's key."""
    kind, _, rest = address.partition("://")
    bucket, _, key = rest.partition("/")
    return f"{kind}://{bucket}/", key
