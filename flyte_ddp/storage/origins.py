"""Which addresses may be read because something on a web server names them: an index, or a redirect.

They are read with the rights of who trains, from inside that one's network: a server that could name any address could
have a cloud's metadata service asked for credentials, or a private bucket read.
"""

import socket
from ipaddress import IPv6Address, ip_address
from typing import Any
from urllib.parse import unquote

from flyte_ddp.settings import allowed_addresses
from flyte_ddp.storage.addresses import scheme, split_key

PORTS = {"http": 80, "https": 443}


def origin_of(address: str) -> str:
    """Return scheme, host and port of a web address, or scheme and bucket of an object's, with a slash at the end."""
    return split_origin(address)[0]


def split_origin(address: str) -> tuple[str, str]:
    """Return an address's origin, in small letters, and its path."""
    if scheme(address) not in PORTS:
        start, key = split_key(address)
        kind, _, bucket = start.partition("://")
        return f"{kind.lower()}://{bucket}", key
    found = parse_url(address)
    kind = found.scheme or ""
    port = f":{found.port}" if found.port not in (None, PORTS[kind]) else ""
    return f"{kind}://{found.host}{port}/", (found.path or "").lstrip("/")


def parse_url(address: str) -> Any:
    """Return the parts of a web address as requests sees them: another parser may see another host in the same text."""
    from urllib3.util import parse_url  # not at the top: it takes 50 ms, and most addresses are none of the web

    return parse_url(address)


def may_be_named(address: str, source: str) -> bool:
    """Return whether a file from a web server may name an address: one of its own origin, or an allowed one.

    Args:
        address: absolute, and not of this machine.
        source: the address of the file on the web server.
    """
    own = "/".join(source.split("/", 3)[:3])
    return address.startswith(f"{own}/") or origin_of(address) == origin_of(source) or is_allowed(address)


def is_allowed(address: str) -> bool:
    """Return whether the setting names an address, or a folder that it is in."""
    origin, path = split_origin(address)
    if ".." in unquote(path).split("/"):
        return False
    return any(
        f"{origin}{path}".startswith(f"{''.join(split_origin(each)).rstrip('/')}/") for each in allowed_addresses()
    )


def may_be_redirected(source: str, target: str) -> bool:
    """Return whether a redirect may be followed: on the same host, to a public one, or to one that is allowed.

    Looks the name of another host up, which may wait for a name server. A name that is not known may be followed: it
    cannot be asked, or a proxy knows it.
    """
    if target.partition("://")[0].lower() not in PORTS:
        return True  # requests refuses it
    here, there = origin_of(source), origin_of(target)
    if there in (here, here.replace("http://", "https://", 1)) or is_allowed(target):
        return True
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(parse_url(target).host.strip("[]"), None)}
    except OSError:
        return True
    return all(is_public(str(each)) for each in found)


def is_public(host: str) -> bool:
    """Return whether an IP address is one of the public internet: not a private, a loopback or a link-local one."""
    found = ip_address(host.partition("%")[0])
    return ((found.ipv4_mapped if isinstance(found, IPv6Address) else None) or found).is_global
