"""The process that keeps wandb fed, and wandb away from training.

It never imports wandb, so that it can always end in time. wandb itself runs in its child, :mod:`flyte_ddp.wandb_feed`,
which may fail, hang or be killed: online it is started again, with growing pauses, until the run is over, and where it
never got through, the whole of metrics.jsonl goes into an offline run that ``wandb sync`` can send.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

from flyte_ddp.run_folder import UNFINISHED

POLL_SECONDS = 0.25
FIRST_PAUSE, LONGEST_PAUSE = 15.0, 600.0  # seconds between attempts to reach the server


@dataclass(frozen=True)
class Order:
    """What the follower is asked to do.

    ``attempt`` is a text that no other attempt at the same run has: of one that was killed the follower may still be at
    work when the next begins. ``offset`` is where in metrics.jsonl this attempt at the run begins, in bytes;
    ``timeout`` the seconds from the end of the run to our own; ``training_pid`` the process whose tree wandb's system
    metrics are about. ``kept_at`` is where a folder that could not be sent goes; empty if it stays.
    """

    run_folder: str
    attempt: str
    training_pid: int
    mode: str
    project: str
    entity: str
    run_id: str
    name: str
    config: dict[str, Any]
    offset: int
    timeout: float
    kept_at: str = ""

    @property
    def unsent(self) -> Path:
        """A file with the name of the folder beside it that could not be sent, where there is one."""
        return self.folder / "unsent"

    @property
    def folder(self) -> Path:
        """The run folder's ``wandb``, which also holds wandb's own files."""
        return Path(self.run_folder, "wandb")

    @property
    def path(self) -> Path:
        """The file in which this stands."""
        return self.folder / f"order-{self.attempt}.json"

    @property
    def status(self) -> Path:
        """The file that says how far wandb got."""
        return self.folder / f"status-{self.attempt}.json"

    @property
    def log(self) -> Path:
        """What wandb and these processes print."""
        return self.folder / "follower.log"


@dataclass(frozen=True)
class Status:
    """How far wandb got: its folder and address once opened, the reason where something went wrong.

    "finished": everything is where the mode says; "unsent": it is on disk, but not all of it reached the server.
    """

    state: Literal["starting", "open", "finished", "unsent", "failed"] = "starting"
    folder: str = ""
    url: str = ""
    reason: str = ""


def read_order(path: str) -> Order:
    """The order in this file."""
    return Order(**json.loads(Path(path).read_text()))


def opened(run_folder: Path, name: str) -> BinaryIO:
    """A file of the run's: from where it is while that trains, or else from where it is put at its end.

    Raises:
        FileNotFoundError: there is none yet.
    """
    try:
        return (run_folder / UNFINISHED / name).open("rb")
    except FileNotFoundError:
        return (run_folder / name).open("rb")


def read_status(order: Order) -> Status:
    """How far wandb got by now."""
    try:
        return Status(**json.loads(order.status.read_text()))
    except (OSError, ValueError, TypeError):
        return Status()


def write_status(order: Order, status: Status) -> None:
    """Replaces the status in one step, because others read it at any time."""
    partial = order.status.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(status)))
    partial.replace(order.status)


class EndOfRun:
    """Whether standard input has become readable (a byte, or closed by a parent's death), or the parent is gone."""

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._since: float | None = None

    def wait(self, seconds: float) -> bool:
        """Waits for the end of the run, at most so long."""
        if self._since is None:
            readable, _, _ = select.select([sys.stdin], [], [], seconds)
            if readable or os.getppid() != self._parent:
                self._since = time.monotonic()
        return self._since is not None

    def elapsed(self) -> float:
        """Seconds since the end of the run was noticed."""
        return 0.0 if self._since is None else time.monotonic() - self._since


def launch(module: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Runs a module of this package, with a pipe for its standard input."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=Path(__file__).resolve().parents[1],  # what `-m` puts first on the path: this very copy of the package
        stdin=subprocess.PIPE,
        **options,
    )


def kill_tree(pid: int) -> None:
    """Kills a process and all its descendants: wandb-core leads a session of its own, which a group kill misses."""
    for victim in [pid, *descendants(pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Children, grandchildren and so on, from /proc; none on systems without it (there wandb-core ends by itself)."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The command's name, in parentheses, may itself contain anything.
            parent = int(path.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[1:]


def supervise(order: Order) -> None:
    """Feeds wandb until the run has ended, and leaves the status behind."""
    end = EndOfRun()
    reason = ""
    if order.mode == "online":
        for pause in pauses():
            status = attempt(order, "online", end)
            if status.state in ("finished", "unsent"):
                return
            reason = status.reason or reason or "the server did not answer"
            # A run that was open once is not opened again: its records would be sent twice.
            if status.folder or end.wait(pause):
                break
    status = attempt(order, "offline", end)
    if status.state == "failed" and status.folder:  # wandb was killed, say: what it has written is in the next one too
        shutil.rmtree(status.folder, ignore_errors=True)
        status = attempt(order, "offline", end)
    write_status(order, replace(status, reason=status.reason or reason))


def pauses() -> Iterator[float]:
    """Seconds to wait before trying the server again."""
    pause = FIRST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, LONGEST_PAUSE)


def attempt(order: Order, mode: str, end: EndOfRun) -> Status:
    """Runs wandb once, until it is done, has failed or is out of time."""
    write_status(order, Status())
    own = f"run-*-{order.run_id}"
    before = set(order.folder.glob(own))
    feed = launch("flyte_ddp.wandb_feed", str(order.path), mode, env=environment(order))
    assert feed.stdin is not None
    while feed.poll() is None and not end.wait(POLL_SECONDS):
        pass
    feed.stdin.close()
    # An offline run must still fit in where the server does not answer, and all of it into the parent's patience.
    until_done = 0.9 * order.timeout
    until_open = 0.25 * order.timeout if mode == "online" else until_done
    while feed.poll() is None:
        if end.elapsed() > (until_open if read_status(order).state == "starting" else until_done):
            kill_tree(feed.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            feed.wait(POLL_SECONDS)
    status = read_status(order)
    if status.state == "open" and end.elapsed() > until_done:
        status = replace(status, state="unsent", reason="out of time")
    elif status.state == "open":
        status = replace(status, state="failed", reason="wandb was killed")
    write_status(order, status)
    if not status.folder and [*order.folder.glob("order-*.json")] == [order.path]:  # else they may be a retry's
        for folder in set(order.folder.glob(own)) - before:  # without a run in it there is nothing to sync
            shutil.rmtree(folder, ignore_errors=True)
    return status


def environment(order: Order) -> dict[str, str]:
    """For wandb's process: no error reports to others, and images of tables in the run folder, not in the home."""
    return {**os.environ, "WANDB_ERROR_REPORTING": "false", "WANDB_DATA_DIR": str(order.folder)}


if __name__ == "__main__":
    os.nice(10)  # the ranks go first
    supervise(read_order(sys.argv[1]))
