"""Starts and stops the child process, wandb_feed.py, which sends metrics.jsonl to wandb."""

import multiprocessing
import os
import re
import shlex
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any

from flyte_ddp import storage
from flyte_ddp.core.checks.parsing import JsonObject
from flyte_ddp.core.errors import StoppedError, print_to_stderr, shorten_path
from flyte_ddp.core.machine.process import kill_process_trees
from flyte_ddp.core.runs.run_folder import METRICS, PREDICTIONS
from flyte_ddp.core.settings import Settings
from flyte_ddp.tracking.messages import ENDED, Order, Status
from flyte_ddp.tracking.wandb_feed import NOTHING_RECORDED, POLL_SECONDS, follow_records, open_run_file

COMMAND = (sys.executable, "-m", "flyte_ddp.tracking.wandb_feed")
STOPPED_SECONDS = 5.0  # a pod that must stop has little time left
LOG = "feed.log"  # what the child and wandb print
OPEN_SHARE = 0.25  # of the time in finish(), for the server's first answer


@contextmanager
def log_to_wandb(
    run_folder: Path, settings: Settings, hyperparameters: Mapping[str, Any], *, on_first_record: bool = False
) -> Iterator[None]:
    """Send the run folder's metrics to wandb during the block, by a child process that logs in ``wandb/``.

    Does nothing if wandb is disabled. If wandb is offline, only prints at the end how to send the run. If the child
    process cannot be started, prints the reason to stderr. At the end waits up to ``settings.wandb_timeout`` seconds
    for the child, or up to 5 s after a StoppedError, and then kills the child. If the run is not open yet, the limit is
    a quarter of this time. Prints the location of the run to stderr. With ``on_first_record`` the wandb run is opened
    only when the user's function records something.
    """
    process, seconds = None, settings.wandb_timeout
    if settings.wandb_mode == "online":
        try:
            process = WandbProcess(run_folder, settings, hyperparameters, on_first_record=on_first_record)
        except (OSError, ValueError, TypeError) as error:
            print_to_stderr(f"wandb: not started ({error}); the metrics are in {METRICS} of {shorten_path(run_folder)}")
    try:
        yield
    except StoppedError:
        seconds = min(seconds, STOPPED_SECONDS)
        raise
    finally:
        if process is not None:
            process.finish(seconds)
        elif settings.wandb_mode == "offline":
            kinds = {record.get("kind") for record in follow_records(run_folder, 0, lambda _: True)}
            if "record" in kinds or not on_first_record:
                print_to_stderr(f"wandb: kept offline; {describe_sending(run_folder, settings)}")


def make_init_arguments(run_folder: Path, settings: Settings, hyperparameters: Mapping[str, Any]) -> JsonObject:
    """Return the arguments of ``wandb.init``. Without ``settings.wandb_run_id``, the run's id is random."""
    return {
        "dir": str(run_folder.absolute()),
        "mode": "online",
        "project": settings.wandb_project,
        "entity": settings.wandb_entity or None,
        "id": re.sub(r"[^\w-]+", "-", settings.wandb_run_id, flags=re.ASCII)[-128:] or uuid.uuid4().hex[:8],
        "name": run_folder.name,
        "config": dict(hyperparameters),
        "resume": "allow",  # a retry continues the run
        "settings": {
            "console": "off",
            "disable_git": True,
            "disable_code": True,
            "init_timeout": 60.0,  # seconds, during training; at its end OPEN_SHARE counts
            "finish_timeout": max(0.1, settings.wandb_timeout / 2),
            "finish_timeout_raises": True,
            "x_transaction_log_flush_interval": 1.0,  # seconds of records that a kill may lose
            "x_stats_pid": os.getpid(),
            "x_stats_track_process_tree": True,
        },
    }


class WandbProcess:
    """The child process that runs wandb for a run folder, started at once. Call :meth:`finish` in a ``finally``.

    The constructor creates the folder ``wandb`` in the run folder, and raises OSError, ValueError or TypeError if the
    process cannot be started. With ``on_first_record`` the wandb run is opened only when the user's function records
    something. With ``from_start`` records that exist already are sent, too.
    """

    def __init__(
        self,
        run_folder: Path,
        settings: Settings,
        hyperparameters: Mapping[str, Any],
        *,
        on_first_record: bool = False,
        from_start: bool = False,
    ) -> None:
        self.run_folder, self.settings = run_folder, settings
        self.folder = run_folder.absolute() / "wandb"
        self.folder.mkdir(parents=True, exist_ok=True)
        offset = 0  # bytes of metrics.jsonl that an earlier attempt has written
        with suppress(FileNotFoundError), open_run_file(run_folder, METRICS) as file:
            offset = 0 if from_start else os.fstat(file.fileno()).st_size
        self.status = Status()  # as the child has sent it
        self.pipe, childs_pipe = multiprocessing.Pipe()
        with childs_pipe, (self.folder / LOG).open("ab") as log:
            self.process = Popen(
                [*COMMAND, str(childs_pipe.fileno())],
                cwd=Path(__file__).resolve().parents[2],  # `-m` imports from here first: this copy of flyte_ddp
                env=wandb_environment(self.folder),
                pass_fds=[childs_pipe.fileno()],
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a terminal's Ctrl-C does not reach the child
            )
        arguments = make_init_arguments(run_folder, settings, hyperparameters)
        self.pipe.send(Order(arguments, offset, on_first_record))

    def receive_status(self) -> bool:
        """Update ``status`` with the child's messages, and return whether wandb has opened the run."""
        with suppress(EOFError, OSError):  # the child has ended
            while self.pipe.poll():
                self.status = self.pipe.recv()
        return bool(self.status.url)

    def finish(self, seconds: float) -> bool:
        """Notify the child that training has ended, wait for the exit, and print the location of the run to stderr.

        Returns whether all records were sent.

        Kills the child and its processes after ``seconds``. If the run is not open yet, the limit is OPEN_SHARE (a
        quarter) of ``seconds``. If the child waited for a record in vain, prints nothing, and removes an empty folder
        ``wandb``.
        """
        start = time.monotonic()
        with suppress(OSError):  # the child may have ended
            self.pipe.send(ENDED)  # closing is not enough: forked processes may hold copies of the pipe
        try:
            while self.process.poll() is None:
                share = 1 if self.receive_status() else OPEN_SHARE
                if time.monotonic() >= start + share * seconds:
                    break
                with suppress(TimeoutExpired):
                    self.process.wait(POLL_SECONDS)
        finally:  # also on a second Ctrl-C
            if late := self.process.poll() is None:
                kill_process_trees(lambda: [self.process.pid])  # with wandb-core, which has another session
            self.process.kill()
            code = self.process.wait()
        is_open = self.receive_status()
        if code == NOTHING_RECORDED:
            self.remove_empty_folder()
            return False
        if code < 0 and not self.status.reason:
            killed = "timed out" if is_open else "the server did not answer"
            self.status = replace(self.status, reason=killed if late else "wandb was killed")
        sent = is_open and code == 0
        print_to_stderr(self.describe_outcome(sent=sent))
        return sent

    def remove_empty_folder(self) -> None:
        """Remove an empty feed.log, and then the folder ``wandb`` if nothing else is in the folder. Ignore errors."""
        log = self.folder / LOG
        with suppress(OSError):  # the folder has other files
            if not log.stat().st_size:
                log.unlink()
            self.folder.rmdir()

    def describe_outcome(self, *, sent: bool) -> str:
        """Return a line for the user with the run's location, or how to send an unsent run.

        In a pod, uploads the metrics of an unsent run.
        """
        url, reason = self.status.url, f" ({self.status.reason})" if self.status.reason else ""
        if sent:
            return f"wandb: {url}{reason}"
        what = f"{url} is not complete" if url else "nothing was logged"
        see = "" if url else f"; wandb's messages are in {shorten_path(self.folder / LOG)}"
        return f"wandb: {what}{reason}; {describe_sending(self.run_folder, self.settings)}{see}"


def describe_sending(run_folder: Path, settings: Settings) -> str:
    """Return the command that sends a run to wandb, as text.

    If ``settings.wandb_kept_at`` is set, first uploads the files that the command reads to a folder there.
    """
    command = "send it with: python -m flyte_ddp.tracking send"
    if not settings.wandb_kept_at:
        return f"{command} {shlex.quote(shorten_path(run_folder))}"
    place = storage.join_address(settings.wandb_kept_at, run_folder.name)
    try:
        for name in (METRICS, PREDICTIONS):
            with suppress(FileNotFoundError), open_run_file(run_folder, name) as file:
                storage.write_file(storage.join_address(place, name), file.read())
    except Exception as error:
        return f"the metrics could not be uploaded to {place}: {error}"
    return f"{command} {run_folder.name} (stored in {place})"


def wandb_environment(folder: Path) -> dict[str, str]:
    """Return this process's environment for wandb, without wandb's error reports. wandb's data go into ``folder``.

    White space at the ends of the API key is removed.
    """
    # A Kubernetes secret made ``--from-file`` ends with a newline, which wandb rejects.
    key = os.environ.get("WANDB_API_KEY", "").strip()
    ours = {"WANDB_ERROR_REPORTING": "false", "WANDB_DATA_DIR": str(folder)}
    return {**os.environ, **ours, **({"WANDB_API_KEY": key} if key else {})}
