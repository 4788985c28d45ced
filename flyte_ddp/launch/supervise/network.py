"""Sockets between hosts, and the interface over which ranks talk."""

from __future__ import annotations

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
    """Has the kernel notice when the other host has gone without closing the connection."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNHEARD_MILLISECONDS)


def shut(connected: socket.socket) -> None:
    """Ends a connection, of which another thread may be reading."""
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


@contextmanager
def cut_off_after(connected: socket.socket, seconds: float) -> Iterator[None]:
    """Ends a connection if the block is not done in time, however slowly the other side talks."""
    timer = threading.Timer(seconds, shut, [connected])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def prove_key(pipe: Connection, key: bytes, role: bytes, peers_role: bytes) -> None:
    """Prove to the peer that this side knows the key, and have it prove the same; unpickles nothing.

    Raises:
        AuthenticationError: the peer does not know the key.
        EOFError, OSError: the peer has left, or sends more than a proof.
    """
    challenge = secrets.token_bytes(32)
    pipe.send_bytes(challenge)
    pipe.send_bytes(hmac.digest(key, role + pipe.recv_bytes(64), "sha256"))
    if not hmac.compare_digest(pipe.recv_bytes(64), hmac.digest(key, peers_role + challenge, "sha256")):
        raise AuthenticationError("the peer does not know the run's key")


def use_network(host: str) -> None:
    """Has the ranks talk over the interface that has this address, unless the user has chosen one."""
    for _, name in socket.if_nameindex():
        if address_of(name) == host:
            for variable in NETWORK_VARIABLES:
                os.environ.setdefault(variable, name)


def own_addresses() -> tuple[str, ...]:
    """This host's IPv4 addresses that others may reach it by: not the one that every host has for itself."""
    found = (address_of(name) for _, name in socket.if_nameindex())
    return tuple(address for address in found if address and not is_loopback(address))


def is_loopback(address: str) -> bool:
    """Whether it is the address that every host has for itself."""
    return address.startswith("127.") or address == "::1"


def address_of(interface: str) -> str:
    """The interface's IPv4 address, or nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])
