"""A run's checkpoints in the blob store, for the next attempt at the run and for other executions of the same run.

An attempt writes files of its own, BASE/RUN/EXECUTION/KIND-ATTEMPT-STEP-EPOCH-TIME, and resumes from the newest
readable checkpoint of any attempt. Kinds other than SAVED are notes of a few bytes that tell how an attempt ended.
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
from flyte_ddp.errors import OutOfMemoryError, RankError, RankLostError, UnreachableError, UserError
from flyte_ddp.files import atomic_write
from flyte_ddp.runs import checkpoint
from flyte_ddp.runs.checkpoint import Checkpoint
from flyte_ddp.storage import MissingError, UnavailableError

SAVED = "saved"  # a checkpoint
STARTED = "started"  # the attempt has its data, and launches its ranks
FAILED = "failed"  # a rank of the attempt failed, which may happen again; holds the reason
ENDED = "ended"  # the attempt was told to stop, or could not reach something; holds the reason
DONE = "done"  # the attempt has a result
ADDRESS = re.compile(rf"(.+)/({SAVED}|{STARTED}|{FAILED}|{ENDED}|{DONE})-(\d+)-(\d+)-(\d+)-(\d+)")
KEPT_CHECKPOINTS = 2  # of an execution
DONE_SECONDS = 3600.0  # until files of an execution with a result are deleted: the platform may start it once more
FUTILE_ATTEMPTS = 2  # attempts of which a rank failed without progress; there is no third
LOST_ATTEMPTS = 5  # attempts that were lost without progress: what a pod whose memory runs out may cost
DELETE_BATCH = 1000  # files that one request deletes
MORE_MEMORY = "give the pod more memory (another profile, or mem= of your task), or train with fewer ranks in it"
Result = TypeVar("Result")


class RunFile(NamedTuple):
    """What the address of a file of a run says about the file."""

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
    """The files of one run in the blob store, as one attempt at the run reads and writes them.

    Methods raise UnavailableError if the blob store refuses or does not answer, unless their docstrings say otherwise.
    """

    folder: str  # address of the run's folder: a path, s3://, gs:// or az://
    execution: str  # id of the execution to which the attempt belongs
    attempt: int = 0  # number of the attempt in its execution
    days: float = 14.0  # age at which a file is deleted
    from_scratch: bool = False  # whether to ignore checkpoints of other executions

    def download_newest_checkpoint(self, path: Path) -> Checkpoint | None:
        """Return the newest readable checkpoint, of the blob store or of the folder of ``path``; None if there is none.

        Downloads it to ``path``, unless the folder has one that is as new. UserError if this attempt would be in vain.
        """
        try:
            files = self.retry_on_outage(self.folder, lambda _: self.list_files_newest_first())
        except UnavailableError as error:
            raise UserError(
                f"{self.folder}: {error}; whether there is a checkpoint is not known: allow pods to list, read and "
                "write files there, or set FLYTE_DDP_CHECKPOINTS to where they may, and register again"
            ) from error
        newest = self.download_newest_readable(files, path)
        self.refuse_futile_attempt(files, newest.step if newest else 0)
        return newest

    def retry_on_outage(self, address: str, action: Callable[[str], Result]) -> Result:
        """Return ``action(address)``, in up to 4 tries, and print pauses; UnreachableError if all fail by an outage."""
        try:
            return storage.retry(address, action, lambda note: print(f"checkpoints: {note}", flush=True))
        except UnavailableError as error:
            if not error.transient:
                raise
            raise UnreachableError(f"checkpoints in {address}: {error}; the same run will try again") from error

    def list_files_newest_first(self) -> list[RunFile]:
        """Return a run's files, highest step first, without other executions with a result (``from_scratch``: all)."""
        files = list_run_files(self.folder)
        ignored = {file.execution for file in files if file.kind == DONE or self.from_scratch} - {self.execution}
        files = [file for file in files if file.execution not in ignored]
        return sorted(files, key=lambda file: (file.step, file.epoch, file.time), reverse=True)

    def find_saved_runs(self, prefix: str) -> dict[str, int]:
        """Return the newest saved step of each other run whose name has the prefix, and none if listing fails."""
        steps = {}
        with suppress(UnavailableError):
            base, own = posixpath.split(self.folder)
            for run in storage.list_folders(base):
                if run.startswith(prefix) and run != own:
                    files = replace(self, folder=f"{base}/{run}").list_files_newest_first()
                    steps[run] = next((file.step for file in files if file.kind == SAVED), 0)
        return steps

    def download_newest_readable(self, files: list[RunFile], path: Path) -> Checkpoint | None:
        """Return the newest readable checkpoint, local or of ``files`` (newest first); None without any checkpoint."""
        # Only a pod whose ranks Elastic has restarted has checkpoints in its folder.
        newest, unreadable = checkpoint.verify_checkpoints(path.parent)
        reasons = {str(local): reason for local, reason in unreadable.items()}
        replaced = False
        for file in files:
            if file.kind != SAVED or (newest and (file.step, file.epoch) <= (newest.step, newest.epoch)):
                continue
            try:
                newest = self.download_checkpoint(file.address, path)
            except MissingError:  # another attempt has deleted this checkpoint, as there are newer ones
                replaced = True
            except (UnavailableError, checkpoint.UnreadableError) as error:
                reasons[file.address] = str(error)
            else:
                print(f"found the checkpoint of attempt {file.attempt} of {file.execution}", flush=True)
                break
        unusable = " and ".join(f"{address} ({reason})" for address, reason in reasons.items())
        if newest is not None:
            if unusable:
                print(f"checkpoint {unusable} cannot be used; that of step {newest.step:,} is", flush=True)
            return newest
        if replaced:
            raise UnreachableError(f"{self.folder}: checkpoints were replaced meanwhile; the same run will try again")
        if unusable:
            raise UserError(
                f"cannot read the run's checkpoints {unusable}: make one of them readable to go on from it, or launch "
                "with --overwrite-cache or delete them to restart from scratch"
            )
        return None

    def download_checkpoint(self, address: str, path: Path) -> Checkpoint:
        """Download and verify a checkpoint; replace the file ``path`` by the download, and return the Checkpoint."""
        with atomic_write(path, durable=False) as file:
            self.retry_on_outage(address, lambda source: storage.download_file(source, file))
            file.flush()
            found = checkpoint.read_checkpoint(Path(file.name))
            assert found is not None
        return replace(found, path=path)

    def refuse_futile_attempt(self, files: list[RunFile], step: int) -> None:
        """Raise UserError if earlier attempts of this execution began at ``step`` or later and ended in vain.

        Refuses after two that failed, or five that left no note of how they ended. Those that were told to stop, or
        launched no ranks, do not count. ``files`` are the run's in the blob store, newest first.
        """
        attempts: dict[int, dict[str, RunFile]] = defaultdict(dict)
        # An attempt that Elastic restarted has several starts. The last in the list has the lowest step, and counts.
        for file in files:
            if file.execution == self.execution and file.attempt < self.attempt and file.kind != SAVED:
                attempts[file.attempt][file.kind] = file
        began = [notes for _, notes in sorted(attempts.items()) if STARTED in notes and notes[STARTED].step >= step]
        futile = [notes[FAILED] for notes in began if FAILED in notes]
        lost = [notes for notes in began if notes.keys() == {STARTED}]
        if len(futile) >= FUTILE_ATTEMPTS:
            reason = self.retry_on_outage(futile[-1].address, storage.read_file).decode()
            raise UserError(
                f"{len(futile)} attempts got no further than step {step:,}, where they began, so no other one is made; "
                f"the last one: {reason}"
            )
        if len(lost) >= LOST_ATTEMPTS:
            raise UserError(
                f"{len(lost)} attempts were lost, or killed without a word, before they got further than step "
                f"{step:,}, where they began, so no other one is made; Kubernetes says why (kubectl describe pod, or "
                f"the console): if it is OOMKilled, {MORE_MEMORY}; else launch it again"
            )

    def record_attempt_start(self, step: int) -> None:
        """Write a note that the attempt launches its ranks, after ``step``; UnreachableError after 4 tries."""
        self.retry_on_outage(self.folder, lambda _: self.write_note(STARTED, step))

    def upload_checkpoint(self, path: Path) -> None:
        """Upload a checkpoint in one try, and keep this execution's 2 newest. FileNotFoundError without the file."""
        with path.open("rb") as file:
            this = Path(f"/dev/fd/{file.fileno()}")  # also if a newer one takes the path's place meanwhile
            header = checkpoint.read_checkpoint(this, most_bytes=0)  # the next attempt verifies
            assert header is not None
            storage.write_file(self.new_file_address(SAVED, header.step, header.epoch, header.time), this)
        self.delete_older_checkpoints(KEPT_CHECKPOINTS)

    def record_attempt_end(self, error: BaseException | None) -> None:
        """Note that this attempt ended by ``error`` (not by RankLostError); for None, a result, keep one checkpoint."""
        if error is None:
            self.write_note(DONE)
            self.delete_older_checkpoints(1)  # this pod may be lost before the platform has the result
        elif isinstance(error, OutOfMemoryError):
            self.write_note(FAILED, text=f"{error}; {MORE_MEMORY}")
        elif not isinstance(error, RankLostError):  # without a note the attempt counts as lost
            self.write_note(FAILED if isinstance(error, RankError) else ENDED, text=str(error))

    def write_note(self, kind: str, step: int = 0, text: str = "") -> None:
        content = text or kind  # some stores take no empty file
        storage.write_file(self.new_file_address(kind, step), content.encode(errors="replace"))

    def new_file_address(self, kind: str, step: int, epoch: int = 0, written: float | None = None) -> str:
        seconds = int(time.time() if written is None else written)
        return RunFile(f"{self.folder}/{self.execution}", kind, self.attempt, step, epoch, seconds).address

    def delete_older_checkpoints(self, kept: int) -> None:
        with suppress(UnavailableError):
            files = self.list_files_newest_first()
            mine = [file for file in files if (file.execution, file.kind) == (self.execution, SAVED)]
            storage.delete_files([file.address for file in mine[kept:]])

    def delete_abandoned_files(self, seconds: float) -> None:
        """Delete old files of all runs in this project and domain for up to ``seconds``, and ignore all errors.

        They are older than ``days``, or of an execution that has had a result for an hour.
        """
        now, deadline = time.time(), time.monotonic() + seconds
        with suppress(Exception):  # the next pod repeats what fails
            files = list_run_files(posixpath.dirname(self.folder))
            done = {file.folder for file in files if file.kind == DONE and now - file.time > DONE_SECONDS}
            old = [file for file in files if file.folder in done or now - file.time > self.days * 86_400]
            for first in range(0, len(old), DELETE_BATCH):
                if time.monotonic() < deadline:
                    with suppress(UnavailableError):  # even if this fails in every pod, others are deleted
                        storage.delete_files([file.address for file in old[first : first + DELETE_BATCH]])


def list_run_files(folder: str) -> list[RunFile]:
    with suppress(MissingError):  # for a path only: a missing prefix of a bucket is empty
        files = [parse_run_file(f"{folder}/{entry.name}") for entry in storage.list_files(folder)]
        return [file for file in files if file is not None]
    return []
