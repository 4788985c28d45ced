"""Sockets between hosts, and the interface over which ranks talk."""

import fcntl
import hmac
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

UNHEARD_MILLISECONDS = 30_000  # until a host that does not confirm what it was sent is gone
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # a host that is gone is noticed in 30 s
SIOCGIFADDR = 0x8915  # linux/sockios.h
NETWORK_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def keep_alive(connected: socket.socket) -> None:
    """Have the kernel end the connection when the other host has been silent for 30 s."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNHEARD_MILLISECONDS)


def shut(connected: socket.socket) -> None:
    """End a connection, from which another thread may be reading."""
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


@contextmanager
def authenticated_pipe(
    connected: socket.socket, key: bytes, role: bytes, peers_role: bytes, seconds: float
) -> Iterator[Connection]:
    """Yield a pipe to a peer that has proved that it knows the key, to exchange first messages; it stays open.

    Proves to the peer that this side knows the key, too; unpickles nothing for that. The roles of the two sides differ,
    so that a peer cannot send back what it was sent. Ends the connection if proof and block take longer than
    ``seconds``, however slowly the peer sends.

    Raises:
        AuthenticationError: the peer does not know the key.
        EOFError, OSError: the peer has left, or sends more than a proof, or the time is over.
    """
    keep_alive(connected)
    timer = threading.Timer(seconds, shut, [connected])
    timer.daemon = True
    timer.start()
    pipe = Connection(os.dup(connected.fileno()))
    try:
        prove_key(pipe, key, role, peers_role)
        yield pipe
    except BaseException:
        pipe.close()
        raise
    finally:
        timer.cancel()


def prove_key(pipe: Connection, key: bytes, role: bytes, peers_role: bytes) -> None:
    """See :func:`authenticated_pipe`."""
    challenge = secrets.token_bytes(32)
    pipe.send_bytes(challenge)
    pipe.send_bytes(hmac.digest(key, role + pipe.recv_bytes(64), "sha256"))
    if not hmac.compare_digest(pipe.recv_bytes(64), hmac.digest(key, peers_role + challenge, "sha256")):
        raise AuthenticationError("the peer does not know the run's key")


def use_network(host: str) -> None:
    """Set the variables by which gloo and NCCL use the interface with this address, unless the user has set them."""
    for _, name in socket.if_nameindex():
        if address_of(name) == host:
            for variable in NETWORK_VARIABLES:
                os.environ.setdefault(variable, name)


def own_addresses() -> tuple[str, ...]:
    """Return this host's IPv4 addresses, without those of the loopback."""
    found = (address_of(name) for _, name in socket.if_nameindex())
    return tuple(address for address in found if address and not is_loopback(address))


def is_loopback(address: str) -> bool:
    """Return whether an address is of the loopback."""
    return address.startswith("127.") or address == "::1"


def address_of(interface: str) -> str:
    """Return an interface's IPv4 address, or an empty string."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])
