"""Find processes of this machine in /proc, and wait for conditions."""

import time
from collections.abc import Callable
from pathlib import Path


def children_of(pid: int) -> list[str]:
    """Return the command lines of running children.

    Children of multiprocessing, of torch's compiler and of the tests are skipped. The tests start zygotes, and S3
    servers (rclone) that several test files share.
    """
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
            fields = rest.split()
            command = stat.with_name("cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        own = name.endswith(("(zygote", "(rclone")) or "resource_tracker" in command or "/torch/_inductor/" in command
        if int(fields[1]) == pid and fields[0] != "Z" and not own:
            found.append(command)
    return found


def processes_with(text: str, name: str = "") -> dict[int, str]:
    """Return id and command line of each process with ``text`` in the environment and ``name`` in the command."""
    found = {}
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if text in environment.read_text(errors="replace"):
                command = environment.with_name("cmdline").read_text().replace("\0", " ")
                found |= {int(environment.parent.name): command} if name in command else {}
        except OSError:
            continue
    return found


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Call the condition until the result is true. Raise AssertionError after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)
