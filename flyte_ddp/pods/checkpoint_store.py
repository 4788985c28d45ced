"""Keep a run's checkpoints in the blob store, for later attempts and other executions of the run.

Each attempt writes separate files, BASE/RUN/EXECUTION/KIND-ATTEMPT-STEP-EPOCH-TIME, and resumes from the newest
readable checkpoint of any attempt. Files of kinds other than SAVED are notes of a few bytes on how an attempt ended.
"""

import posixpath
import re
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from flyte_ddp import storage
from flyte_ddp.core.errors import OutOfMemoryError, RankError, RankLostError, UnreachableError, UserError
from flyte_ddp.core.files import atomic_write
from flyte_ddp.core.runs import checkpoint
from flyte_ddp.core.runs.checkpoint import Checkpoint
from flyte_ddp.storage import MissingError, UnavailableError

SAVED = "saved"  # a checkpoint
STARTED = "started"  # the attempt has the data, and launches ranks
FAILED = "failed"  # a rank of the attempt failed, and may fail again; holds the reason
ENDED = "ended"  # the attempt was stopped on request, or could not reach a service; holds the reason
DONE = "done"  # the attempt has a result
ADDRESS = re.compile(rf"(.+)/({SAVED}|{STARTED}|{FAILED}|{ENDED}|{DONE})-(\d+)-(\d+)-(\d+)-(\d+)")
KEPT_CHECKPOINTS = 2  # for each execution
DONE_SECONDS = 3600.0  # until files of an execution with a result are deleted: the platform may restart the execution
FUTILE_ATTEMPTS = 2  # limit of attempts in which a rank failed without progress
LOST_ATTEMPTS = 5  # limit of attempts that were lost without progress, such as by running out of memory
DELETE_BATCH = 1000  # files that one request deletes
MORE_MEMORY = "give the pod more memory (another profile, or mem= of your task), or run fewer ranks in the pod"
Result = TypeVar("Result")


class RunFile(NamedTuple):
    """The properties of a run's file, which the address encodes."""

    folder: str  # address of the folder of the execution that wrote the file
    kind: str  # SAVED, STARTED, FAILED, ENDED or DONE
    attempt: int  # number of the attempt that wrote the file, from 0
    step: int  # of a checkpoint or a start; else 0
    epoch: int  # of a checkpoint; else 0
    time: int  # of writing, in seconds since 1970

    @property
    def address(self) -> str:
        return f"{self.folder}/{'-'.join(map(str, self[1:]))}"

    @property
    def execution(self) -> str:
        return posixpath.basename(self.folder)


def parse_run_file(address: str) -> RunFile | None:
    match = ADDRESS.fullmatch(address)
    return RunFile(match[1], match[2], *map(int, match.groups()[2:])) if match else None


@dataclass(frozen=True)
class CheckpointStore:
    """The files of a run in the blob store, as an attempt at the run reads and writes them.

    Unless documented otherwise, methods raise UnavailableError if the blob store rejects a request or does not answer.
    """

    folder: str  # address of the run's folder: a path, s3://, gs:// or az://
    execution: str  # id of the execution to which the attempt belongs
    attempt: int = 0  # number of the attempt in its execution
    days: float = 14.0  # age at which a file is deleted
    from_scratch: bool = False  # whether to ignore checkpoints of other executions

    def download_newest_checkpoint(self, path: Path) -> Checkpoint | None:
        """Download the run's newest readable checkpoint to ``path``, and return the checkpoint.

        Returns None without checkpoints. Makes up to 4 tries of each request, and prints the pauses between tries.
        Prints the attempt of the checkpoint, and the faults of unusable checkpoints.

        Raises:
            UserError: Checkpoints cannot be listed or read, or too many earlier attempts made no progress.
            UnreachableError: The blob store has an outage, or other attempts replaced the checkpoints.
        """
        try:
            files = self.retry_on_outage(self.folder, lambda _: self.list_files_newest_first())
        except UnavailableError as error:
            raise UserError(
                f"{self.folder}: {error}; cannot tell whether a checkpoint exists; allow pods to list, read and write "
                "files there, or set FLYTE_DDP_CHECKPOINTS to an address where pods may, and register again"
            ) from error
        newest = self.download_newest_readable(files, path)
        self.refuse_futile_attempt(files, newest.step if newest else 0)
        return newest

    def retry_on_outage(self, address: str, action: Callable[[str], Result]) -> Result:
        """Return ``action(address)``, after up to 4 tries. Prints the pauses between tries.

        Raises:
            UnreachableError: All tries failed by an outage.
            UnavailableError: The blob store rejected the request. MissingError is a subclass for a missing file.
        """
        try:
            return storage.call_with_retries(address, action, lambda note: print(f"checkpoints: {note}", flush=True))
        except UnavailableError as error:
            if not error.transient:
                raise
            raise UnreachableError(f"checkpoints in {address}: {error}; the next attempt will try again") from error

    def list_files_newest_first(self) -> list[RunFile]:
        """Return the run's files in the blob store, highest step first.

        Skips the files of other executions that have a result. If ``from_scratch`` is set, skips the files of all other
        executions.
        """
        files = list_run_files(self.folder)
        ignored = {file.execution for file in files if file.kind == DONE or self.from_scratch} - {self.execution}
        files = [file for file in files if file.execution not in ignored]
        return sorted(files, key=lambda file: (file.step, file.epoch, file.time), reverse=True)

    def read_saved_steps(self, prefix: str) -> dict[str, int]:
        """Return the newest saved step of each other run whose name starts with ``prefix``, by the run's name.

        The step is 0 for a run without a checkpoint. If the blob store fails, returns the runs that were found before.
        """
        steps = {}
        with suppress(UnavailableError):
            base, own = posixpath.split(self.folder)
            for run in storage.list_folders(base):
                if run.startswith(prefix) and run != own:
                    files = replace(self, folder=f"{base}/{run}").list_files_newest_first()
                    steps[run] = next((file.step for file in files if file.kind == SAVED), 0)
        return steps

    def download_newest_readable(self, files: list[RunFile], path: Path) -> Checkpoint | None:
        """Download the newest readable checkpoint of ``files`` (newest first) to ``path``, and return the checkpoint.

        Returns None without any checkpoint. Makes up to 4 tries of each download, and prints the pauses between tries.
        Prints the attempt of the checkpoint, and the faults of unusable checkpoints.

        Raises:
            UserError: Checkpoints exist, but none is readable.
            UnreachableError: Other attempts replaced the checkpoints during the download, or the blob store has an
                outage.
        """
        newest: Checkpoint | None = None
        reasons: dict[str, str] = {}
        replaced = False
        for file in files:
            if file.kind != SAVED:
                continue
            try:
                newest = self.download_checkpoint(file.address, path)
            except MissingError:  # another attempt deleted this checkpoint after writing newer ones
                replaced = True
            except (UnavailableError, checkpoint.UnreadableError) as error:
                reasons[file.address] = str(error)
            else:
                print(f"found the checkpoint of attempt {file.attempt} of {file.execution}", flush=True)
                break
        unusable = " and ".join(f"{address} ({reason})" for address, reason in reasons.items())
        if newest is not None:
            if unusable:
                print(f"checkpoint {unusable} cannot be used; using the checkpoint of step {newest.step:,}", flush=True)
            return newest
        if replaced:
            raise UnreachableError(
                f"{self.folder}: other attempts replaced the checkpoints; the next attempt will try again"
            )
        if unusable:
            raise UserError(
                f"cannot read the run's checkpoints {unusable}: make one readable to resume from it, or launch "
                "with --overwrite-cache or delete them to restart from scratch"
            )
        return None

    def download_checkpoint(self, address: str, path: Path) -> Checkpoint:
        """Download and verify a checkpoint, replace the file ``path``, and return the Checkpoint.

        Makes up to 4 tries, and prints the pauses between tries. After an error, the file ``path`` is unchanged.

        Raises:
            MissingError: The address has no checkpoint.
            UnreachableError: All tries failed by an outage.
            UnavailableError: The blob store rejected the request.
            UnreadableError: The checkpoint is damaged or has another format.
        """
        with atomic_write(path, durable=False) as file:
            self.retry_on_outage(address, lambda source: storage.download_file(source, file))
            file.flush()
            found = checkpoint.read_checkpoint(Path(file.name))
            assert found is not None
        return replace(found, path=path)

    def refuse_futile_attempt(self, files: list[RunFile], step: int) -> None:
        """Raise UserError if too many earlier attempts of this execution made no progress beyond ``step``.

        The limit is two attempts that failed, or five attempts that left no note on how they ended. Attempts that were
        stopped on request, or launched no ranks, do not count. Before the error is raised, downloads the reason of the
        last failure, in up to 4 tries with printed pauses.

        Args:
            files: The run's files in the blob store, newest first.
            step: The newest checkpoint's step.
        """
        attempts: dict[int, dict[str, RunFile]] = defaultdict(dict)
        # An attempt whose pods were replaced has several starts. The last in the list has the lowest step, and counts.
        for file in files:
            if file.execution == self.execution and file.attempt < self.attempt and file.kind != SAVED:
                attempts[file.attempt][file.kind] = file
        began = [notes for _, notes in sorted(attempts.items()) if STARTED in notes and notes[STARTED].step >= step]
        futile = [notes[FAILED] for notes in began if FAILED in notes]
        lost = [notes for notes in began if notes.keys() == {STARTED}]
        if len(futile) >= FUTILE_ATTEMPTS:
            reason = self.retry_on_outage(futile[-1].address, storage.read_file).decode()
            raise UserError(
                f"{len(futile)} attempts made no progress after step {step:,}, so no further attempt is made; the last "
                f"error: {reason}"
            )
        if len(lost) >= LOST_ATTEMPTS:
            raise UserError(
                f"{len(lost)} attempts were lost, or killed without an error, before any progress after step {step:,}, "
                "so no further attempt is made; Kubernetes has the reason (kubectl describe pod, or the console): if "
                f"OOMKilled, {MORE_MEMORY}; else launch the run again"
            )

    def record_attempt_start(self, step: int) -> None:
        """Write a note that this attempt is about to launch its ranks, in up to 4 tries.

        ``step`` is the step after which the run resumes (0: from scratch).

        Raises:
            UnreachableError: All tries failed by an outage.
            UnavailableError: The blob store rejected the request.
        """
        self.retry_on_outage(self.folder, lambda _: self.write_note(STARTED, step))

    def upload_checkpoint(self, path: Path) -> None:
        """Upload a checkpoint in a single try, and delete all but the 2 newest checkpoints of this execution.

        A failure to delete checkpoints is ignored.

        Raises:
            FileNotFoundError: ``path`` does not exist.
            UnreadableError: The checkpoint's header cannot be read.
        """
        with path.open("rb") as file:
            this = Path(f"/dev/fd/{file.fileno()}")  # the same file even if a newer one replaces the path
            header = checkpoint.read_checkpoint(this, most_bytes=0)  # the next attempt verifies the content
            assert header is not None
            storage.write_file(self.new_file_address(SAVED, header.step, header.epoch, header.time), this)
        self.delete_older_checkpoints(KEPT_CHECKPOINTS)

    def record_attempt_end(self, error: BaseException | None) -> None:
        """Write a note on how this attempt ended: with a result if ``error`` is None, else by the error.

        After a result, deletes all checkpoints of this execution but the newest. Writes no note for a RankLostError, so
        the attempt counts as lost.
        """
        if error is None:
            self.write_note(DONE)
            self.delete_older_checkpoints(1)  # this pod may be lost before the platform has the result
        elif isinstance(error, OutOfMemoryError):
            self.write_note(FAILED, text=f"{error}; {MORE_MEMORY}")
        elif not isinstance(error, RankLostError):  # without a note the attempt counts as lost
            self.write_note(FAILED if isinstance(error, RankError) else ENDED, text=str(error))

    def write_note(self, kind: str, step: int = 0, text: str = "") -> None:
        content = text or kind  # some stores reject empty files
        storage.write_file(self.new_file_address(kind, step), content.encode(errors="replace"))

    def new_file_address(self, kind: str, step: int, epoch: int = 0, written: float | None = None) -> str:
        seconds = int(time.time() if written is None else written)
        return RunFile(f"{self.folder}/{self.execution}", kind, self.attempt, step, epoch, seconds).address

    def delete_older_checkpoints(self, kept: int) -> None:
        """Delete all checkpoints of this execution but the ``kept`` newest. Ignores errors of the blob store."""
        with suppress(UnavailableError):
            files = self.list_files_newest_first()
            mine = [file for file in files if (file.execution, file.kind) == (self.execution, SAVED)]
            storage.delete_files([file.address for file in mine[kept:]])

    def delete_abandoned_files(self, seconds: float) -> None:
        """Delete old files of all runs in this project and domain for up to ``seconds``. Ignores all errors.

        A file is old after ``days``, or an hour after the execution got a result.
        """
        now, deadline = time.time(), time.monotonic() + seconds
        with suppress(Exception):  # the next pod repeats what fails
            files = list_run_files(posixpath.dirname(self.folder))
            done = {file.folder for file in files if file.kind == DONE and now - file.time > DONE_SECONDS}
            old = [file for file in files if file.folder in done or now - file.time > self.days * 86_400]
            for first in range(0, len(old), DELETE_BATCH):
                if time.monotonic() < deadline:
                    with suppress(UnavailableError):  # if this batch fails in every pod, others are still deleted
                        storage.delete_files([file.address for file in old[first : first + DELETE_BATCH]])


def list_run_files(folder: str) -> list[RunFile]:
    with suppress(MissingError):  # for a path only: a missing prefix of a bucket is empty
        files = [parse_run_file(f"{folder}/{entry.name}") for entry in storage.list_files(folder)]
        return [file for file in files if file is not None]
    return []
