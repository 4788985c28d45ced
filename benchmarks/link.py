"""Two hosts on a single machine: network namespaces, joined by a veth pair with limited speed."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

ADDRESSES = ("10.78.0.1", "10.78.0.2")


@dataclass(frozen=True)
class Host:
    """A network namespace with an address and a processor core."""

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
        """Return the bytes sent over the link from this host, as the interface counts them."""
        path = f"/sys/class/net/{self.name}/statistics/tx_bytes"
        return int(subprocess.run(self.command("cat", path), check=True, capture_output=True).stdout)


@contextmanager
def linked_hosts(megabits: int) -> Iterator[tuple[Host, Host]]:
    """Yield two linked hosts. The link carries ``megabits`` Mbit/s each way, or is unlimited for 0.

    At the end of the block, processes on the hosts are killed.

    Raises:
        OSError, subprocess.CalledProcessError: Root's rights or iproute2 are missing.
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
