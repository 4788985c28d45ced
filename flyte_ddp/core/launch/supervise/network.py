"""The network interfaces of this host, and the interface that ranks use."""

import fcntl
import os
import socket
import struct

LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915  # linux/sockios.h
NETWORK_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def set_network_interface(host: str) -> None:
    """Set gloo's and NCCL's environment variables to the interface with the IPv4 address ``host``.

    A variable that is set already is kept. If no interface has the address, does nothing.
    """
    for _, name in socket.if_nameindex():
        if interface_address(name) == host:
            for variable in NETWORK_VARIABLES:
                os.environ.setdefault(variable, name)


def host_addresses() -> tuple[str, ...]:
    found = (interface_address(name) for _, name in socket.if_nameindex())
    return tuple(address for address in found if address and not is_loopback(address))


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def interface_address(interface: str) -> str:
    """Return the IPv4 address of a network interface, or "" if the interface has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])
