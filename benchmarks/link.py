"""Two hosts on one machine: network namespaces, joined by a veth pair with a limit on its speed."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

ADDRESSES = ("10.78.0.1", "10.78.0.2")


@dataclass(frozen=True)
class Host:
    """A namespace with an address, and a core of its own."""

    name: str
    address: str
    core: int

    def command(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, "taskset", "--cpu-list", str(self.core), *command]

    def kill_all(self) -> None:
        found = subprocess.run(["ip", "netns", "pids", self.name], check=False, capture_output=True).stdout
        for pid in found.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def sent(self) -> int:
        """Bytes that have gone over the link from here, as the interface counts them."""
        path = f"/sys/class/net/{self.name}/statistics/tx_bytes"
        return int(subprocess.run(self.command("cat", path), check=True, capture_output=True).stdout)


@contextmanager
def linked_hosts(megabits: int) -> Iterator[tuple[Host, Host]]:
    """Two of them; the link carries so many Mbit/s each way, or if that is 0, what it can.

    What still runs there at the end of the block is killed.

    Raises:
        OSError, subprocess.CalledProcessError: this takes root's rights, and iproute2.
    """
    names = [f"fdb{os.getpid()}{letter}" for letter in "ab"]
    hosts = [Host(name, address, core) for core, (name, address) in enumerate(zip(names, ADDRESSES, strict=True))]
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", names[0], "netns", names[0], "type", "veth", "peer", names[1], "netns", names[1])
        for host in hosts:
            within = ("ip", "netns", "exec", host.name)
            run(*within, "ip", "address", "add", f"{host.address}/24", "dev", host.name)
            run(*within, "ip", "link", "set", host.name, "up")
            run(*within, "ip", "link", "set", "lo", "up")
            if megabits:
                shaper = ("tbf", "rate", f"{megabits}mbit", "burst", "256kb", "latency", "50ms")
                run(*within, "tc", "qdisc", "add", "dev", host.name, "root", *shaper)
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            host.kill_all()
            subprocess.run(["ip", "netns", "delete", host.name], check=False, capture_output=True)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
