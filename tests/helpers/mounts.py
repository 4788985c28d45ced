"""File systems and limits of a test's own: in a mount namespace that nothing else on the machine sees."""

import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ALONE = ("unshare", "--mount", "--map-root-user")  # before a command: it may mount what it likes


def need_mounts(folder: Path) -> None:
    """Skip the test if the machine does not allow mounts in a namespace."""
    try:
        subprocess.run([*ALONE, "mount", "-t", "tmpfs", "none", str(folder)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount in a namespace (unshare)")


@contextmanager
def file_size_limit(most: int) -> Iterator[None]:
    """Let the kernel refuse larger files, as a full disk would, until the end of the block."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
