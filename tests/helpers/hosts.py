"""Two hosts on one machine, as in benchmarks/link.py. Tests start and kill processes on both."""

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
    """A network namespace."""

    def start(
        self,
        command: list[str],
        log: Path,
        environment: Mapping[str, str],
        hidden: Path | None = None,
        names: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command on this host, with both output streams in the log.

        The command sees the folder ``hidden`` as empty. The file ``names`` replaces /etc/hosts, and then the hostname
        is the name of the namespace.
        """
        mounts = [f'mount -t tmpfs none "{hidden}"'] if hidden else []
        mounts += [f'mount --bind "{names}" /etc/hosts', f'hostname "{self.name}"'] if names else []
        script = " && ".join([*mounts, 'exec "$@"'])
        inside = ["ip", "netns", "exec", self.name, "unshare", "--mount", "--uts", "sh", "-c", script, "sh", *command]
        with log.open("wb") as file:
            return subprocess.Popen(
                inside, stdout=file, stderr=subprocess.STDOUT, env=dict(environment), start_new_session=True
            )

    def is_lost(self, process: subprocess.Popen[bytes]) -> None:
        """Cut the link, then SIGKILL all processes of this host. The other host receives no message."""
        subprocess.run(
            ["ip", "netns", "exec", self.name, "ip", "link", "set", self.name, "down"], check=True, capture_output=True
        )
        os.killpg(process.pid, signal.SIGKILL)
        self.kill_all()
        process.wait()


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Yield two linked hosts. Skip the test if network namespaces are not allowed."""
    with ExitStack() as stack:
        try:
            first, second = stack.enter_context(link.linked_hosts(0))
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("needs the right to make network namespaces (ip netns)")
        yield Host(*astuple(first)), Host(*astuple(second))
