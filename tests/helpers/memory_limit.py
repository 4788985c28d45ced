"""A memory cgroup with a limit, for what the kernel does where a container's memory runs out."""

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

VERSION_1 = Path("/sys/fs/cgroup/memory")


@contextmanager
def memory_limit(limit: int) -> Iterator[Path]:
    """The file to which a process writes 0 to be limited to so many bytes; skips the test where that is not allowed."""
    is_first = VERSION_1.is_dir()
    folder = (VERSION_1 if is_first else Path("/sys/fs/cgroup")) / f"flyte-ddp-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"a memory cgroup cannot be made here ({error.strerror}), as in most containers")
    try:
        setting = folder / ("memory.limit_in_bytes" if is_first else "memory.max")
        if not setting.exists():
            pytest.skip("the root cgroup does not hand its memory controller on")
        setting.write_text(str(limit))
        yield folder / "cgroup.procs"
    finally:
        remove(folder)


def remove(folder: Path) -> None:
    """Remove a cgroup when its last process has ended, which may be after the one that started it; waits for 30 s."""
    deadline = time.monotonic() + 30
    while folder.is_dir():
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
