"""Two hosts on one machine, as benchmarks have them, in which tests start and lose processes."""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import astuple
from pathlib import Path

import pytest

from benchmarks import link


class Host(link.Host):
    """A namespace."""

    def start(
        self,
        command: list[str],
        log: Path,
        environment: Mapping[str, str],
        hidden: Path | None = None,
        names: Path | None = None,
        resolver: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts a command there.

        Args:
            command: and its arguments.
            log: takes what it prints.
            environment: its own.
            hidden: a folder of which it sees another, empty one in its place.
            names: what it sees in place of /etc/hosts; the host is then called as its namespace is.
            resolver: what it sees in place of /etc/resolv.conf.
        """
        mounts = [f'mount -t tmpfs none "{hidden}"'] if hidden else []
        mounts += [f'mount --bind "{names}" /etc/hosts', f'hostname "{self.name}"'] if names else []
        mounts += [f'mount --bind "{resolver}" /etc/resolv.conf'] if resolver else []
        script = " && ".join([*mounts, 'exec "$@"'])
        inside = ["ip", "netns", "exec", self.name, "unshare", "--mount", "--uts", "sh", "-c", script, "sh", *command]
        with log.open("wb") as file:
            return subprocess.Popen(
                inside, stdout=file, stderr=subprocess.STDOUT, env=dict(environment), start_new_session=True
            )

    def is_lost(self, process: subprocess.Popen[bytes]) -> None:
        """From one moment to the next, and without a word to the other."""
        subprocess.run(
            ["ip", "netns", "exec", self.name, "ip", "link", "set", self.name, "down"], check=True, capture_output=True
        )
        os.killpg(process.pid, signal.SIGKILL)
        self.kill_all()
        process.wait()


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Skips the test where the machine does not let it make namespaces."""
    with ExitStack() as stack:
        try:
            first, second = stack.enter_context(link.linked_hosts(0))
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("needs the right to make network namespaces (ip netns)")
        yield Host(*astuple(first)), Host(*astuple(second))
