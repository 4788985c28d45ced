"""wandb, fed from metrics.jsonl by a process of its own.

Training only appends lines to a file. Whatever wandb does (no key, a dead server, a crash) happens in a child,
wandb_feed.py. :func:`start_wandb` starts it, and :meth:`WandbProcess.finish` ends it in bounded time.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import shlex
import shutil
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any

from flyte_ddp.errors import from_here
from flyte_ddp.process import kill_trees
from flyte_ddp.runs.run_folder import METRICS
from flyte_ddp.settings import Settings
from flyte_ddp.tracking.wandb_feed import NOT_SENT, POLL_SECONDS, open_run_file

COMMAND = (sys.executable, "-m", "flyte_ddp.tracking.wandb_feed")
LOG = "feed.log"  # what the child and wandb print
OPEN_SHARE = 0.25  # of the end's time: for the server to answer, before another child keeps the run offline


def start_wandb(
    run_folder: Path, settings: Settings, hyperparameters: Mapping[str, Any], name: str
) -> WandbProcess | None:
    """Start the process that feeds wandb from the run folder's metrics.jsonl; return at once and never raise.

    Records of an earlier attempt at the same run are not sent again, but an offline run has all of them: syncing it
    replaces what the server has of the run. wandb's own files go to the folder's ``wandb``. Returns None if wandb is
    disabled or the process cannot be started (which is printed).
    """
    if settings.wandb_mode == "disabled":
        return None
    run = {  # the arguments of wandb.init
        "dir": str(run_folder.absolute()),
        "mode": settings.wandb_mode,
        "project": settings.wandb_project,
        "entity": settings.wandb_entity or None,
        "id": re.sub(r"[^\w-]+", "-", settings.wandb_run_id, flags=re.ASCII)[-128:] or uuid.uuid4().hex[:8],
        "name": name,
        "config": dict(hyperparameters),
        "resume": "allow",  # a retry goes on with the same run
        "settings": {
            "console": "off",
            "disable_git": True,
            "disable_code": True,
            "init_timeout": 60.0,  # while training goes on; at its end OPEN_SHARE counts
            "finish_timeout": max(0.1, settings.wandb_timeout / 2),
            "finish_timeout_raises": True,
            "x_transaction_log_flush_interval": 1.0,  # what a kill may lose
            "x_stats_pid": os.getpid(),
            "x_stats_track_process_tree": True,
        },
    }
    try:
        return WandbProcess(run, settings)
    except (OSError, ValueError, TypeError) as error:
        say(f"wandb: not started ({error}); the metrics are in {METRICS} of {from_here(run_folder)}")
        return None


class WandbProcess:
    """The child that feeds wandb, by the arguments of ``wandb.init``; :meth:`finish` belongs in a ``finally``."""

    def __init__(self, run: dict[str, Any], settings: Settings) -> None:
        self.run, self.settings, self.offset = run, settings, 0
        self.folder = Path(run["dir"], "wandb")
        self.folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError), open_run_file(self.folder.parent, METRICS) as file:
            self.offset = os.fstat(file.fileno()).st_size
        self.online = f"run-*-{run['id']}"  # folders of online runs, also of those that could not be opened
        self.others = {*map(str, self.folder.glob(self.online))}
        self.start()

    def start(self) -> None:
        """Start a child, which leads a session of its own, and send it the run."""
        self.status = {"folder": "", "url": "", "reason": ""}  # wandb's, once it is open; why something is missing
        self.pipe, its_pipe = multiprocessing.Pipe()
        with its_pipe, (self.folder / LOG).open("ab") as log:
            self.process = Popen(
                [*COMMAND, str(its_pipe.fileno())],
                cwd=Path(__file__).resolve().parents[2],  # what `-m` puts first on the path: this very copy
                env=wandb_environment(self.folder),
                pass_fds=[its_pipe.fileno()],
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a terminal's Ctrl-C is not for it
            )
        self.pipe.send((self.run, self.offset))

    def is_open(self) -> bool:
        """Return whether wandb has opened its run by now; takes over what the child has sent."""
        with suppress(EOFError, OSError):  # the child has ended
            while self.pipe.poll():
                self.status |= self.pipe.recv()
        return bool(self.status["folder"])

    def finish(self, limit: float = math.inf) -> None:
        """Tell the child that the run is over, wait for its end and print where the run can be seen.

        If wandb did not open it, or was killed, another child feeds all of it into an offline run. Either is killed
        after ``limit`` seconds, or ``settings.wandb_timeout`` if that is less. Folders of runs that could not be opened
        are removed; the name of one that a pod is to keep elsewhere is written to ``wandb/unsent``.
        """
        begin, seconds = time.monotonic(), min(limit, self.settings.wandb_timeout)
        deadline = begin + seconds
        usable = self.end(begin + OPEN_SHARE * seconds if self.run["mode"] == "online" else deadline, deadline)
        first = self.status
        if not usable and time.monotonic() < deadline:
            self.run["mode"] = "offline"
            with suppress(OSError):
                self.start()
                self.end(deadline, deadline)
            if not self.status["folder"]:
                self.status = first
            self.status["reason"] = self.status["reason"] or first["reason"]
        spent = {*map(str, self.folder.glob(self.online)), first["folder"]} - {*self.others, self.status["folder"], ""}
        for folder in spent:  # of a run that could not be opened, or is in another one
            shutil.rmtree(folder, ignore_errors=True)
        sent = bool(self.status["url"]) and self.process.returncode == 0
        say(self.outcome(sent))
        with suppress(OSError):
            unsent = self.folder / "unsent"
            unsent.unlink(missing_ok=True)
            if self.settings.wandb_kept_at and self.status["folder"] and not sent:
                unsent.write_text(Path(self.status["folder"]).name)

    def end(self, open_by: float, done_by: float) -> bool:
        """Wait for the end of the child, or kill it with its descendants; return whether its run can be used.

        A child is killed at ``done_by``, by time.monotonic(), and at ``open_by`` if it has not opened its run.
        """
        with suppress(OSError):  # not only a closed pipe: a forked process that is still around keeps a copy of it open
            self.pipe.send("over")
        try:
            while self.process.poll() is None and time.monotonic() < (done_by if self.is_open() else open_by):
                with suppress(TimeoutExpired):
                    self.process.wait(POLL_SECONDS)
        finally:  # also on a second Ctrl-C
            if late := self.process.poll() is None:
                kill_trees(lambda: [self.process.pid])  # wandb-core leads a session of its own
            self.process.kill()
            code = self.process.wait()
        is_open = self.is_open()
        if late and is_open:
            self.status["reason"] = "out of time"
        elif code < 0 and not self.status["reason"]:
            self.status["reason"] = "the server did not answer" if late else "wandb was killed"
        return is_open and (late or code in (0, NOT_SENT))

    def outcome(self, sent: bool) -> str:
        """Return one line: where the run can be seen, how to send it, or why there is nothing to send."""
        folder, url, reason = self.status.values()
        if not folder:
            reason, log = reason or "wandb did not start", from_here(self.folder / LOG)
            return f"wandb: nothing was logged ({reason}); see {log}, the metrics are in {METRICS}"
        reason = f" ({reason})" if reason else ""
        if sent:
            return f"wandb: {url}{reason}"
        sync = f"wandb sync {shlex.quote(from_here(Path(folder)))}"
        if self.settings.wandb_kept_at:
            sync = f"wandb sync {Path(folder).name}, which you find in {self.settings.wandb_kept_at}"
        if url:
            return f"wandb: {url} is not complete{reason}; send the rest with: {sync}"
        return f"wandb: kept offline{reason}; send it with: {sync}"


def wandb_environment(folder: Path) -> dict[str, str]:
    """Return the environment of a process that runs wandb: no error reports, images of tables in ``folder``.

    The key is the user's without white space at its ends: a Kubernetes secret made ``--from-file`` ends with a newline,
    which wandb refuses.
    """
    key = os.environ.get("WANDB_API_KEY", "").strip()
    ours = {"WANDB_ERROR_REPORTING": "false", "WANDB_DATA_DIR": str(folder)}
    return {**os.environ, **ours, **({"WANDB_API_KEY": key} if key else {})}


def say(text: str) -> None:
    """Print a line to stderr, if anybody is listening any more."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
