"""Decide which addresses a web server may make this process read, by an index or by a redirect.

The process reads with the user's credentials and from inside the user's network. If a web server could name any
address, the process would read private buckets for it, or ask a cloud's metadata service for credentials.
"""

import socket
from ipaddress import IPv6Address, ip_address
from typing import Any
from urllib.parse import unquote

from flyte_ddp.settings import allowed_addresses
from flyte_ddp.storage.addresses import scheme, split_key

PORTS = {"http": 80, "https": 443}


def origin_of(address: str) -> str:
    """Return scheme, host and port of a web address, or scheme and bucket of an object, with a slash at the end."""
    return split_origin(address)[0]


def split_origin(address: str) -> tuple[str, str]:
    """Return an address's origin (``https://host:port/`` without a default port, ``s3://bucket/``) and its path."""
    if scheme(address) not in PORTS:
        start, key = split_key(address)
        kind, _, bucket = start.partition("://")
        return f"{kind.lower()}://{bucket}", key
    found = parse_web_address(address)
    kind = found.scheme or ""
    port = f":{found.port}" if found.port not in (None, PORTS[kind]) else ""
    return f"{kind}://{found.host}{port}/", (found.path or "").lstrip("/")


def parse_web_address(address: str) -> Any:
    """Return a web address as urllib3's ``Url``; requests parses with it, and another parser may find another host."""
    from urllib3.util import parse_url  # not at the top: the import takes 50 ms, and few runs have web addresses

    return parse_url(address)


def may_be_named(address: str, source: str) -> bool:
    """Return whether a file on a web server may name an address: one of the same origin, or an allowed one.

    Args:
        address: the named address; absolute and remote.
        source: address of the file on the web server.
    """
    own = "/".join(source.split("/", 3)[:3])
    # The first comparison is fast and decides for nearly all of an index's 100,000 shards.
    return address.startswith(f"{own}/") or origin_of(address) == origin_of(source) or is_allowed_address(address)


def is_allowed_address(address: str) -> bool:
    """Return whether ``FLYTE_DDP_ALLOWED_ADDRESSES`` has the origin, or a folder that contains the address."""
    origin, path = split_origin(address)
    if ".." in unquote(path).split("/"):
        return False
    return any(
        f"{origin}{path}".startswith(f"{''.join(split_origin(each)).rstrip('/')}/") for each in allowed_addresses()
    )


def may_follow_redirect(source: str, target: str) -> bool:
    """Return whether a redirect may be followed: to the same host, to an allowed address, or to a public host.

    Looks up the target's host name, and waits for the name server. Returns True for an unknown name: a proxy may know
    it, and without a proxy the request fails.

    Args:
        source: address that sends the redirect.
        target: absolute address that the redirect names.
    """
    if target.partition("://")[0].lower() not in PORTS:
        return True  # requests refuses it
    here, there = origin_of(source), origin_of(target)
    if there in (here, here.replace("http://", "https://", 1)) or is_allowed_address(target):
        return True
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(parse_web_address(target).host.strip("[]"), None)}
    except OSError:
        return True
    return all(is_public_ip(str(each)) for each in found)


def is_public_ip(host: str) -> bool:
    """Return whether an IP address belongs to the public internet: it is not private, loopback or link-local."""
    found = ip_address(host.partition("%")[0])
    return ((found.ipv4_mapped if isinstance(found, IPv6Address) else None) or found).is_global
