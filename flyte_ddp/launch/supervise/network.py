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


def enable_keepalive(connected: socket.socket) -> None:
    """Set socket options by which the kernel ends the connection when the other host has been silent for 30 s."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNHEARD_MILLISECONDS)


def shut_connection(connected: socket.socket) -> None:
    """End a connection in both directions; a thread that reads from it gets the end. Ignores errors."""
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


@contextmanager
def authenticated_pipe(
    connected: socket.socket, key: bytes, role: bytes, peers_role: bytes, seconds: float
) -> Iterator[Connection]:
    """Yield a pipe to a peer that has proved that it knows the key; this side proves that, too.

    The proof unpickles nothing. The pipe stays open after the block, and is closed if proof or block raises. The
    connection is ended if proof and block take longer than ``seconds`` in all, however slowly the peer sends.

    Args:
        role: of this side. The roles of both sides differ: a peer cannot send back the proof that it was sent.

    Raises:
        AuthenticationError: the peer does not know the key.
        EOFError, OSError: the peer has left, or sends more than a proof, or the time is over.
    """
    enable_keepalive(connected)
    timer = threading.Timer(seconds, shut_connection, [connected])
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
    """Send a random challenge, answer the peer's by an HMAC of the key, and verify the peer's answer.

    Raises:
        AuthenticationError: the peer's answer is wrong.
        EOFError, OSError: the peer has left, or sends more than 64 bytes.
    """
    challenge = secrets.token_bytes(32)
    pipe.send_bytes(challenge)
    pipe.send_bytes(hmac.digest(key, role + pipe.recv_bytes(64), "sha256"))
    if not hmac.compare_digest(pipe.recv_bytes(64), hmac.digest(key, peers_role + challenge, "sha256")):
        raise AuthenticationError("the peer does not know the run's key")


def set_network_interface(host: str) -> None:
    """Set gloo's and NCCL's environment variables to the interface that has this address, unless they are set."""
    for _, name in socket.if_nameindex():
        if interface_address(name) == host:
            for variable in NETWORK_VARIABLES:
                os.environ.setdefault(variable, name)


def host_addresses() -> tuple[str, ...]:
    """Return this host's IPv4 addresses, one for each interface, without the loopback's."""
    found = (interface_address(name) for _, name in socket.if_nameindex())
    return tuple(address for address in found if address and not is_loopback(address))


def is_loopback(address: str) -> bool:
    """Return whether an IP address belongs to the loopback interface."""
    return address.startswith("127.") or address == "::1"


def interface_address(interface: str) -> str:
    """Return the IPv4 address of an interface, an empty string if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])
