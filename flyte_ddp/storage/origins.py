"""Decide which addresses a web server may make this process read, by an index or by a redirect.

The process reads with the user's credentials and from inside the user's network. If a web server could name any
address, the process would read private buckets for the server, or ask a cloud's metadata service for credentials.
"""

import socket
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any
from urllib.parse import unquote

from flyte_ddp.core.settings import allowed_addresses
from flyte_ddp.storage.addresses import parse_scheme

PORTS = {"http": 80, "https": 443}
# IPv6 networks whose addresses end with an IPv4 address: NAT64 (RFC 6052), and IPv4-compatible (RFC 4291).
EMBEDDING = (IPv6Network("64:ff9b::/96"), IPv6Network("::/96"))
ASSIGNED = (IPv4Network("192.0.0.0/24"),)  # reserved for protocols (RFC 6890), which not all Python releases know


def parse_origin(address: str) -> str:
    """Return scheme, host and port of a web address, or scheme and bucket of an object, with a final slash."""
    return "/".join(normalise_address(address).split("/", 3)[:3]) + "/"


def normalise_address(address: str) -> str:
    """Return a remote address in a form in which equal addresses are equal texts.

    The scheme is in lower case. Default port, query and fragment of a web address are removed.
    """
    kind = parse_scheme(address)
    if kind not in PORTS:
        return f"{kind}://{address.partition('://')[2]}"
    url = parse_web_address(address)
    port = f":{url.port}" if url.port not in (None, PORTS[kind]) else ""
    return f"{kind}://{url.host}{port}/{(url.path or '').lstrip('/')}"


def parse_web_address(address: str) -> Any:
    """Return a web address as urllib3's ``Url``.

    The library requests uses the same parser. Therefore the host that is checked is the host that is contacted.

    Raises:
        urllib3.exceptions.LocationParseError: The address is malformed.
    """
    from urllib3.util import parse_url  # not at the top: the import takes 50 ms, and few runs have web addresses

    return parse_url(address)


def may_index_list_address(address: str, source: str) -> bool:
    """Return whether an index at ``source``, on a web server, is allowed to list ``address``.

    Addresses on the same server and addresses in FLYTE_DDP_ALLOWED_ADDRESSES are allowed.
    """
    own = "/".join(source.split("/", 3)[:3])
    # The first comparison is fast and decides for nearly all of an index's 100,000 shards.
    return address.startswith(f"{own}/") or parse_origin(address) == parse_origin(source) or is_allowed_address(address)


def is_allowed_address(address: str) -> bool:
    """Return whether FLYTE_DDP_ALLOWED_ADDRESSES contains the address's origin, or a folder above the address.

    An address with ".." in its path is never allowed.
    """
    whole = normalise_address(address)
    folders = tuple(f"{normalise_address(each).rstrip('/')}/" for each in allowed_addresses())
    return whole.startswith(folders) and ".." not in unquote(whole).split("/")


def describe_redirect_problem(source: str, target: str) -> str:
    """Return why a redirect from ``source`` to ``target`` is rejected, or "" if the redirect is allowed.

    A redirect may lead to the same server, to an address in FLYTE_DDP_ALLOWED_ADDRESSES, or to a public host. A
    redirect from https to http is rejected, unless the target is in FLYTE_DDP_ALLOWED_ADDRESSES. Looks up the name of
    another host, without a timeout. An unknown name is allowed, because a proxy may know the name. If ``target`` has
    another scheme than http or https, returns "", because requests rejects the redirect.
    """
    if target.partition("://")[0].lower() not in PORTS:
        return ""  # requests rejects the address
    here, there = parse_origin(source), parse_origin(target)
    if there in (here, here.replace("http://", "https://", 1)) or is_allowed_address(target):
        return ""
    if here.startswith("https://") and there.startswith("http://"):
        return "which is not encrypted, unlike the original address"
    try:
        found = socket.getaddrinfo(parse_web_address(target).host.strip("[]"), None)
    except OSError:
        return ""
    is_public = all(is_public_ip(str(entry[4][0])) for entry in found)
    return "" if is_public else "which is another host without a public address"


def is_public_ip(text: str) -> bool:
    """Return whether an IP address belongs to a public host.

    If an IPv6 address contains an IPv4 address, the IPv4 address decides, because a gateway (NAT64, 6to4) may forward
    to the IPv4 address.

    Raises:
        ValueError: The text is not an IP address, for example a host's name.
    """
    ip: IPv4Address | IPv6Address = ip_address(text.partition("%")[0])
    if isinstance(ip, IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if any(ip in network for network in EMBEDDING):
            inner = IPv4Address(int(ip) & 0xFFFF_FFFF)
        ip = inner or ip
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or any(ip in network for network in ASSIGNED))
