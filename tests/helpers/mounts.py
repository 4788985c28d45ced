"""File systems of a test's own: in a mount namespace that nothing else on the machine sees."""

import subprocess
from pathlib import Path

import pytest

ALONE = ("unshare", "--mount", "--map-root-user")  # before a command: it may mount what it likes


def need_mounts(folder: Path) -> None:
    """Skip the test if the machine does not allow mounts in a namespace."""
    try:
        subprocess.run([*ALONE, "mount", "-t", "tmpfs", "none", str(folder)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount in a namespace (unshare)")
