"""File systems and limits for a single test, in a separate mount namespace."""

import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ALONE = ("unshare", "--mount", "--map-root-user")  # prefix of a command that may mount file systems


def need_mounts(folder: Path) -> None:
    """Skip the test if the machine does not allow mounts in a namespace."""
    try:
        subprocess.run([*ALONE, "mount", "-t", "tmpfs", "none", str(folder)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount in a namespace (unshare)")


@contextmanager
def file_size_limit(most: int) -> Iterator[None]:
    """Make the kernel reject larger files, like a full disk, until the end of the block."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
