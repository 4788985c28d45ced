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
from flyte_ddp.tracking.wandb_feed import NOTHING_RECORDED, POLL_SECONDS, follow_metrics_file, open_run_file

COMMAND = (sys.executable, "-m", "flyte_ddp.tracking.wandb_feed")
STOPPED_SECONDS = 5.0  # a pod that must stop has little time left
LOG = "feed.log"  # what the child and wandb print
OPEN_SHARE = 0.25  # of the time in finish_sending(), for the server's first answer


@contextmanager
def log_to_wandb(
    run_folder: Path, settings: Settings, hyperparameters: Mapping[str, Any], *, on_first_record: bool = False
) -> Iterator[None]:
    """Send the run folder's metrics to wandb during the block, by a child process that logs in ``wandb/``.

    If wandb is disabled, does nothing. If wandb is offline, prints at the end how to send the run. If the child process
    cannot be started, prints the reason to stderr.

    The end of the block waits up to ``settings.wandb_timeout`` seconds for the child, and then kills the child. After a
    StoppedError the limit is 5 s. If the wandb run is not open yet, the limit is a quarter. Prints the location of the
    wandb run to stderr.

    If ``on_first_record`` is True, the wandb run is opened when the user's function records something for the first
    time.
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
            process.finish_sending(seconds)
        elif settings.wandb_mode == "offline":
            kinds = {record.get("kind") for record in follow_metrics_file(run_folder, 0, lambda _: True)}
            if "record" in kinds or not on_first_record:
                print_to_stderr(f"wandb: kept offline; {prepare_later_sending(run_folder, settings)}")


def make_wandb_init_arguments(run_folder: Path, settings: Settings, hyperparameters: Mapping[str, Any]) -> JsonObject:
    """Return the arguments of ``wandb.init``. If ``settings.wandb_run_id`` is empty, the run's id is random."""
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
    """The child process that runs wandb for a run folder, started at once. End it by :meth:`finish_sending`.

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
                env=make_wandb_environment(self.folder),
                pass_fds=[childs_pipe.fileno()],
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a terminal's Ctrl-C does not reach the child
            )
        arguments = make_wandb_init_arguments(run_folder, settings, hyperparameters)
        self.pipe.send(Order(arguments, offset, on_first_record))

    def update_status(self) -> bool:
        """Set ``status`` to the child's newest message, and return whether wandb has opened the run. Does not wait."""
        with suppress(EOFError, OSError):  # the child has ended
            while self.pipe.poll():
                self.status = self.pipe.recv()
        return bool(self.status.url)

    def finish_sending(self, seconds: float) -> bool:
        """Tell the child that training has ended, wait for its exit, and print the location of the run to stderr.

        After ``seconds``, kills the child and its processes. If the wandb run is not open yet, the limit is OPEN_SHARE
        (a quarter) of ``seconds``. If the user's function has recorded nothing, prints nothing, and removes the empty
        folder ``wandb``. In a pod, uploads the metrics of an unsent run.

        Returns:
            Whether all records were sent.
        """
        start = time.monotonic()
        with suppress(OSError):  # the child may have ended
            self.pipe.send(ENDED)  # closing is not enough: forked processes may hold copies of the pipe
        try:
            while self.process.poll() is None:
                share = 1 if self.update_status() else OPEN_SHARE
                if time.monotonic() >= start + share * seconds:
                    break
                with suppress(TimeoutExpired):
                    self.process.wait(POLL_SECONDS)
        finally:  # also on a second Ctrl-C
            if late := self.process.poll() is None:
                kill_process_trees(lambda: [self.process.pid])  # with wandb-core, which has another session
            self.process.kill()
            code = self.process.wait()
        is_open = self.update_status()
        if code == NOTHING_RECORDED:
            self.remove_empty_folder()
            return False
        if code < 0 and not self.status.reason:
            killed = "timed out" if is_open else "the server did not answer"
            self.status = replace(self.status, reason=killed if late else "wandb was killed")
        sent = is_open and code == 0
        print_to_stderr(self.prepare_outcome_message(sent=sent))
        return sent

    def remove_empty_folder(self) -> None:
        """Remove the child's log if the log is empty, and then the folder ``wandb`` if empty. Ignores errors."""
        log = self.folder / LOG
        with suppress(OSError):  # the folder has other files
            if not log.stat().st_size:
                log.unlink()
            self.folder.rmdir()

    def prepare_outcome_message(self, *, sent: bool) -> str:
        """Return a line for the user: the run's location, or how to send a run that was not sent.

        Before, uploads the metrics of an unsent run if ``settings.wandb_kept_at`` is set.
        """
        url, reason = self.status.url, f" ({self.status.reason})" if self.status.reason else ""
        if sent:
            return f"wandb: {url}{reason}"
        what = f"{url} is not complete" if url else "nothing was logged"
        see = "" if url else f"; wandb's messages are in {shorten_path(self.folder / LOG)}"
        return f"wandb: {what}{reason}; {prepare_later_sending(self.run_folder, self.settings)}{see}"


def prepare_later_sending(run_folder: Path, settings: Settings) -> str:
    """Return, as text, the command that sends a run to wandb later.

    If ``settings.wandb_kept_at`` is set, first uploads the files that the command needs to this address. If the upload
    fails, returns the reason.
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


def make_wandb_environment(folder: Path) -> dict[str, str]:
    """Return this process's environment variables for wandb, whose data go into ``folder``.

    Turns wandb's error reports off. White space at the ends of the API key is removed.
    """
    # A Kubernetes secret made ``--from-file`` ends with a newline, which wandb rejects.
    key = os.environ.get("WANDB_API_KEY", "").strip()
    ours = {"WANDB_ERROR_REPORTING": "false", "WANDB_DATA_DIR": str(folder)}
    return {**os.environ, **ours, **({"WANDB_API_KEY": key} if key else {})}
