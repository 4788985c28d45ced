"""What a run reports: metrics.jsonl always, and wandb from it, fed by a process of its own.

Training only ever appends lines to a file. Whatever wandb does (no key, a dead server, a crash) happens in other
processes, started by :func:`start_wandb` and ended by :meth:`WandbProcess.finish` in bounded time.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flyte_ddp.errors import from_here
from flyte_ddp.run_folder import METRICS
from flyte_ddp.settings import Settings
from flyte_ddp.wandb_follower import Order, Status, kill_tree, launch, opened, read_status


def start_wandb(
    run_folder: Path, settings: Settings, hyperparameters: Mapping[str, Any], name: str
) -> WandbProcess | None:
    """Starts the process that feeds wandb from the run folder's metrics.jsonl; returns at once and never raises.

    Args:
        run_folder: in whose ``unfinished/``, or itself, metrics.jsonl will be; wandb's own files go to its ``wandb``
            folder. Records that are there already, from an earlier attempt at the same run, are not sent again.
        settings: project, entity, mode, run id and the time that the end may take.
        hyperparameters: wandb's config.
        name: the run's display name.

    Returns:
        The process, or None where wandb is disabled or the process cannot be started (which is printed).
    """
    if settings.wandb_mode == "disabled":
        return None
    try:
        order = Order(
            run_folder=str(run_folder.absolute()),
            attempt=uuid.uuid4().hex[:8],
            training_pid=os.getpid(),
            mode=settings.wandb_mode,
            project=settings.wandb_project,
            entity=settings.wandb_entity,
            run_id=re.sub(r"[^\w-]+", "-", settings.wandb_run_id, flags=re.ASCII)[-128:] or uuid.uuid4().hex[:8],
            name=name,
            config=dict(hyperparameters),
            offset=recorded(run_folder),
            timeout=settings.wandb_timeout,
            kept_at=settings.wandb_kept_at,
        )
        order.folder.mkdir(parents=True, exist_ok=True)
        order.path.write_text(json.dumps(asdict(order)))
        with order.log.open("ab") as log:
            process = launch(
                "flyte_ddp.wandb_follower", str(order.path), stdout=log, stderr=log, start_new_session=True
            )
    except (OSError, ValueError, TypeError) as error:
        say(f"wandb: not started ({error}); the metrics are in {METRICS} of {from_here(run_folder)}")
        return None
    return WandbProcess(process, order)


def recorded(run_folder: Path) -> int:
    """Bytes of records that a run has left there."""
    try:
        with opened(run_folder, METRICS) as file:
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return 0


class WandbProcess:
    """A running follower; :meth:`finish` belongs in a ``finally``."""

    def __init__(self, process: subprocess.Popen[bytes], order: Order) -> None:
        self._process = process
        self._order = order

    @property
    def pid(self) -> int:
        """Process id of the follower."""
        return self._process.pid

    def finish(self, limit: float = math.inf) -> None:
        """Says that the run is over, waits for the end of the follower and prints what became of the run.

        Args:
            limit: seconds to wait, if that is less than ``settings.wandb_timeout``; then the follower is killed.

        """
        process = self._process
        if process.stdin is None or process.stdin.closed:
            return
        with contextlib.suppress(OSError):
            # A byte, not only the closed pipe: a forked process that is still around keeps a copy of it open.
            process.stdin.write(b"\n")
            process.stdin.flush()
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(limit, self._order.timeout))
        finally:  # also where a person loses patience
            if process.poll() is None:
                kill_tree(process.pid)
                process.wait()
            with contextlib.suppress(OSError):  # and its child, where the follower itself was killed
                os.killpg(process.pid, signal.SIGKILL)
        status = read_status(self._order)
        say(outcome(self._order, status))
        with contextlib.suppress(OSError):
            self._order.unsent.unlink(missing_ok=True)
            if self._order.kept_at and status.folder and not is_sent(status):
                self._order.unsent.write_text(Path(status.folder).name)
        for path in (self._order.path, self._order.status):
            path.unlink(missing_ok=True)


def outcome(order: Order, status: Status) -> str:
    """One line: where the run can be seen, or how to send it, or why there is nothing to send."""
    if not status.folder:
        reason = status.reason or "wandb did not start"
        return f"wandb: nothing was logged ({reason}); see {from_here(order.log)}, the metrics are in {METRICS}"
    folder = Path(status.folder)
    sync = f"wandb sync {shlex.quote(from_here(folder))}"
    if order.kept_at:
        sync = f"wandb sync {folder.name}, which you find in {order.kept_at}"
    reason = f" ({status.reason})" if status.reason else ""
    if is_sent(status):
        return f"wandb: {status.url}{reason}"
    if status.url:
        return f"wandb: {status.url} is not complete{reason}; send the rest with: {sync}"
    return f"wandb: kept offline{reason}; send it with: {sync}"


def is_sent(status: Status) -> bool:
    """Whether wandb's server has all of it."""
    return bool(status.url) and status.state == "finished"


def say(text: str) -> None:
    """Prints a line to standard error."""
    with contextlib.suppress(OSError, ValueError):  # nobody may be listening any more
        print(text, file=sys.stderr, flush=True)
