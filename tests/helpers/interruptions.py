"""Stop a process at each change that a function makes to files."""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link")


def ended_before_each_change(
    folder: Path, function: Callable[[Path], object], number: signal.Signals = signal.SIGKILL
) -> Iterator[Path]:
    """Yield copies of a folder in which a process was signalled before the function's first change, second change ...

    In the last copy the function came to the end.
    """
    for place in range(200):
        copy = folder.with_name(f"{number.name}-{place}")
        shutil.copytree(folder, copy)
        child = os.fork()
        if child == 0:
            os._exit(signalled_before_change(place, lambda copy=copy: function(copy), number))  # type: ignore[misc]
        _, status = os.waitpid(child, 0)
        yield copy
        if status == 0:
            return
        assert (os.WTERMSIG(status) or os.WEXITSTATUS(status)) == number
    raise AssertionError("the function never ends")


def signalled_before_change(place: int, function: Callable[[], object], number: signal.Signals) -> int:
    """Call the function, and signal this process before change ``place``. Return 0 if the change did not happen."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    left = place

    def count(event: str, details: tuple[object, ...]) -> None:
        nonlocal left
        opened = event == "open" and isinstance(details[2], int) and details[2] & (os.O_WRONLY | os.O_RDWR)
        if event in CHANGES or opened:
            left -= 1
            if left == -1:
                os.kill(os.getpid(), number)

    sys.addaudithook(count)
    try:
        function()
    except KeyboardInterrupt:
        return number
    return 0 if left >= 0 else 255
