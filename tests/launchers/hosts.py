"""Two hosts on one machine: network namespaces that are joined by a link, each with an address and files of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")


@dataclass(frozen=True)
class Host:
    """A namespace."""

    name: str
    address: str
    link: str

    def start(
        self, command: list[str], log: Path, environment: Mapping[str, str], hidden: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a command there.

        Args:
            command: and its arguments.
            log: takes what it prints.
            environment: its own.
            hidden: a folder of which it sees another, empty one in its place.
        """
        hide = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none "{hidden}" && exec "$@"', "sh"]
        inside = ["ip", "netns", "exec", self.name, *(hide if hidden else []), *command]
        with log.open("wb") as file:
            return subprocess.Popen(
                inside, stdout=file, stderr=subprocess.STDOUT, env=dict(environment), start_new_session=True
            )

    def is_lost(self, process: subprocess.Popen[bytes]) -> None:
        """From one moment to the next, and without a word to the other."""
        ip("netns", "exec", self.name, "ip", "link", "set", self.link, "down")
        os.killpg(process.pid, signal.SIGKILL)
        for pid in subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, check=True).stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        process.wait()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Skips the test where the machine does not let it make namespaces."""
    names = [f"fddp{os.getpid()}{letter}" for letter in "ab"]
    hosts = [Host(name, address, f"{name}v") for name, address in zip(names, ADDRESSES, strict=True)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", hosts[0].link, "netns", names[0], "type", "veth", "peer", hosts[1].link, "netns", names[1])
    except (OSError, subprocess.CalledProcessError):
        remove(names)
        pytest.skip("needs the right to make network namespaces (ip netns)")
    try:
        for host in hosts:
            within = ("netns", "exec", host.name, "ip")
            ip(*within, "address", "add", f"{host.address}/24", "dev", host.link)
            ip(*within, "link", "set", host.link, "up")
            ip(*within, "link", "set", "lo", "up")
        yield hosts[0], hosts[1]
    finally:
        remove(names)


def remove(names: list[str]) -> None:
    """Removes namespaces, and with them what is still running there."""
    for name in names:
        found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, check=False).stdout
        for pid in found.split():
            os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
