"""A run's checkpoints in the blob store, for the next attempt, and for other executions of the same run.

Each attempt writes files under its own names, so that two at the same time never mix. It begins with the newest
readable checkpoint of any attempt. The files of a run are BASE/RUN/EXECUTION/KIND-ATTEMPT-STEP-EPOCH-TIME. A
checkpoint's kind is SAVED. The other kinds are notes of a few bytes that tell later attempts how this attempt ended.
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
from flyte_ddp.runs import checkpoint
from flyte_ddp.runs.checkpoint import Checkpoint
from flyte_ddp.storage import MissingError, UnavailableError

SAVED = "saved"  # a checkpoint
STARTED = "started"  # the attempt has its data, and launches its ranks
TRAINED = "trained"  # the attempt had time to save a checkpoint, and saved none
FAILED = "failed"  # a rank of the attempt failed, which may happen again; holds the reason
ENDED = "ended"  # the attempt was told to stop, or could not reach something; holds the reason
DONE = "done"  # the attempt has a result
ADDRESS = re.compile(rf"(.+)/({SAVED}|{STARTED}|{TRAINED}|{FAILED}|{ENDED}|{DONE})-(\d+)-(\d+)-(\d+)-(\d+)")
KEPT_CHECKPOINTS = 2  # of an execution
DONE_SECONDS = 3600.0  # until files of an execution with a result are deleted: the platform may start it once more
FUTILE_ATTEMPTS = 2  # attempts that failed or had time to save, and made no progress; there is no third
LOST_ATTEMPTS = 5  # attempts without progress that were lost early: what a pod whose memory runs out may cost
DELETE_BATCH = 1000  # files that one request deletes
Result = TypeVar("Result")


class RunFile(NamedTuple):
    """What the address of a run's file says."""

    folder: str  # address of the folder of the run's execution
    kind: str  # SAVED, STARTED, TRAINED, FAILED, ENDED or DONE
    attempt: int  # number of the attempt that wrote the file, from 0
    step: int  # of a checkpoint or a start; else 0
    epoch: int  # of a checkpoint; else 0
    time: int  # of writing, in seconds since 1970

    @property
    def address(self) -> str:
        """The file's address."""
        return f"{self.folder}/{'-'.join(map(str, self[1:]))}"

    @property
    def execution(self) -> str:
        """The id of the execution that wrote the file."""
        return posixpath.basename(self.folder)


def parse_run_file(address: str) -> RunFile | None:
    """Return what the address of a run's file says; None for another file."""
    match = ADDRESS.fullmatch(address)
    return RunFile(match[1], match[2], *map(int, match.groups()[2:])) if match else None


@dataclass(frozen=True)
class CheckpointStore:
    """The files of one run in the blob store, for one attempt at the run.

    Methods raise UnavailableError if the store refuses or does not answer, unless their docstrings say otherwise.
    """

    folder: str  # address of the run's folder: a path, s3://, gs:// or az://
    execution: str  # id of the execution to which the attempt belongs
    attempt: int = 0  # number of the attempt in its execution
    days: float = 14.0  # age at which a file is deleted
    from_scratch: bool = False  # whether to ignore checkpoints of other executions
    memory_advice: str = "give it more memory"  # for an attempt whose memory ran out

    def download_newest(self, path: Path) -> Checkpoint | None:
        """Download the newest readable checkpoint to ``path``, unless the folder of ``path`` has an equally new one.

        Prints which checkpoint is used, and which ones cannot be read.

        Returns:
            The newest checkpoint of the folder and the store; None if neither has one.

        Raises:
            UserError: the store may not be read, it has checkpoints and none can be read, or earlier attempts made no
                progress.
            UnreachableError: the store did not answer in several tries, or its files were replaced meanwhile.
        """
        try:
            files = self.retry_on_outage(self.folder, lambda _: self.list_newest_first())
        except UnavailableError as error:
            raise UserError(
                f"{self.folder}: {error}; whether there is a checkpoint is not known: allow pods to list, read and "
                "write files there, or set FLYTE_DDP_CHECKPOINTS to where they may, and register again"
            ) from error
        newest = self.download_newest_readable(files, path)
        self.refuse_futile_attempt(files, newest.step if newest else 0)
        return newest

    def retry_on_outage(self, address: str, action: Callable[[str], Result]) -> Result:
        """Return the result of an action on an address; try again if the store does not answer, and print why.

        Raises:
            UnavailableError: the store refused, so that another try would fail too.
            UnreachableError: no try succeeded.
        """
        try:
            return storage.retry(address, action, lambda note: print(f"checkpoints: {note}", flush=True))
        except UnavailableError as error:
            if not error.transient:
                raise
            raise UnreachableError(f"checkpoints in {address}: {error}; the same run will try again") from error

    def list_newest_first(self) -> list[RunFile]:
        """Return the run's files that this execution may use, highest step first.

        Leaves out files of other executions that have a result. With ``from_scratch`` leaves out all other executions.
        """
        files = list_run_files(self.folder)
        done = {file.execution for file in files if file.kind == DONE} - {self.execution}
        files = [file for file in files if file.execution not in done]
        if self.from_scratch:
            files = [file for file in files if file.execution == self.execution]
        return sorted(files, key=lambda file: (file.step, file.epoch, file.time), reverse=True)

    def delete_abandoned_files(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Delete the files of all runs in this project that nobody will continue.

        These are files of executions with a result, DONE_SECONDS after it, and files older than ``days``.

        Args:
            stopped: Asked before each DELETE_BATCH of files. True ends the work.
        """
        now = time.time()
        files = list_run_files(posixpath.dirname(self.folder))
        done = {file.folder for file in files if file.kind == DONE and now - file.time > DONE_SECONDS}
        old = [file for file in files if file.folder in done or now - file.time > self.days * 86_400]
        for first in range(0, len(old), DELETE_BATCH):
            if stopped():
                return
            delete_run_files(old[first : first + DELETE_BATCH])

    def download_newest_readable(self, files: list[RunFile], path: Path) -> Checkpoint | None:
        """Download the newest readable checkpoint to ``path``, unless the folder of ``path`` has an equally new one.

        Prints which checkpoint is used, and which ones cannot be read.

        Args:
            files: The run's files in the store, newest checkpoints first.
            path: Where to put the checkpoint.

        Returns:
            The newest checkpoint of the folder and the store; None if neither has one.

        Raises:
            UserError: there are checkpoints, and none can be read.
            UnreachableError: the store did not answer in several tries, or its files were replaced meanwhile.
        """
        # Only a pod whose ranks Elastic has restarted has checkpoints in its folder.
        newest, unreadable = checkpoint.find_newest(path.parent)
        reasons = {str(local): why for local, why in unreadable.items()}
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
        said = " and ".join(f"{address} ({why})" for address, why in reasons.items())
        if newest is not None:
            if reasons:
                print(f"checkpoint {said} cannot be used; that of step {newest.step:,} is", flush=True)
            return newest
        if replaced:
            raise UnreachableError(f"{self.folder}: checkpoints were replaced meanwhile; the same run will try again")
        if reasons:
            raise UserError(
                f"cannot read the run's checkpoints {said}: make one of them readable to go on from it, or launch with "
                "--overwrite-cache or delete them to restart from scratch"
            )
        return None

    def download_checkpoint(self, address: str, path: Path) -> Checkpoint:
        """Download a checkpoint, verify it, replace the file ``path`` by it, and return it.

        On any error the file ``path`` stays as it was.

        Raises:
            MissingError: the store has no such file.
            UnreachableError: the store did not answer in several tries.
            UnreadableError: the checkpoint is damaged, or has the format of another release.
        """
        temporary = path.with_name(f".{path.name}.tmp")

        def download(address: str) -> None:
            """Write the content of the address to the temporary file, and compare its length."""
            with storage.open_file(address) as content, temporary.open("wb") as file:
                storage.check_length(sum(map(file.write, content.chunks)), content.size, remote=True)

        try:
            self.retry_on_outage(address, download)
            found = checkpoint.read(temporary)
            assert found is not None
            temporary.replace(path)
            return replace(found, path=path)
        finally:
            temporary.unlink(missing_ok=True)

    def refuse_futile_attempt(self, files: list[RunFile], step: int) -> None:
        """Raise UserError if enough earlier attempts of this execution began at the newest checkpoint in vain.

        Two attempts in which a rank failed, or which had time to save and did not, are enough. Five attempts that were
        lost earlier are enough: a pod may be lost by bad luck, or because its memory ran out, which only Kubernetes
        knows. An attempt does not count if it was told to stop, could not reach something, or was lost while it fetched
        its data. May read one note from the store, in several tries.

        Args:
            files: The run's files in the store, newest checkpoints first.
            step: Step of the newest checkpoint, 0 without one.
        """
        attempts: dict[int, dict[str, RunFile]] = defaultdict(dict)
        # An attempt that Elastic restarted has several starts. The last in the list has the lowest step, and counts.
        for file in files:
            if file.execution == self.execution and file.attempt < self.attempt and file.kind != SAVED:
                attempts[file.attempt][file.kind] = file
        began_here = [
            notes for _, notes in sorted(attempts.items()) if STARTED in notes and notes[STARTED].step >= step
        ]
        futile = [notes.get(FAILED) or notes[TRAINED] for notes in began_here if notes.keys() & {FAILED, TRAINED}]
        lost = [notes for notes in began_here if notes.keys() == {STARTED}]
        if len(futile) >= FUTILE_ATTEMPTS:
            why = self.retry_on_outage(futile[-1].address, storage.read_file).decode()
            raise UserError(
                f"{len(futile)} attempts got no further than step {step:,}, where they began, so no other one is made; "
                f"the last one: {why}"
            )
        if len(lost) >= LOST_ATTEMPTS:
            raise UserError(
                f"{len(lost)} attempts were lost, or killed without a word, before they got further than step "
                f"{step:,}, where they began, so no other one is made; Kubernetes says why (kubectl describe pod, or "
                f"the console): if it is OOMKilled, {self.memory_advice}; else launch it again"
            )

    def record_start(self, step: int) -> None:
        """Write a note that the attempt has its data and launches its ranks from a step on.

        Raises:
            UnreachableError: the store did not answer in several tries.
        """
        self.retry_on_outage(self.folder, lambda _: self.write_note(STARTED, step))

    def upload_checkpoint(self, path: Path) -> None:
        """Verify and upload a checkpoint, then delete those of this execution but the KEPT_CHECKPOINTS newest.

        Raises:
            FileNotFoundError: the file is missing.
            UnreadableError: the checkpoint is damaged.
        """
        header = checkpoint.read(path)
        if header is None:
            raise FileNotFoundError(path)
        storage.write_file(self.new_file(SAVED, header.step, header.epoch).address, path)
        self.delete_older_checkpoints(KEPT_CHECKPOINTS)

    def record_end(self, error: BaseException | None) -> None:
        """Write a note how the attempt ended, and after a result delete all but the newest checkpoint of the execution.

        Writes none for a RankLostError, which says nothing of the run.

        Args:
            error: Exception that ended the attempt. None for an attempt with a result.
        """
        if error is None:
            self.write_note(DONE, 0)
            self.delete_older_checkpoints(1)  # this pod may be lost before the platform has the result
        elif isinstance(error, OutOfMemoryError):
            self.write_note(FAILED, 0, f"{error}; {self.memory_advice}")
        elif not isinstance(error, RankLostError):
            self.write_note(FAILED if isinstance(error, RankError) else ENDED, 0, str(error))

    def delete_older_checkpoints(self, kept: int) -> None:
        """Delete this execution's checkpoints but a number of the newest; do nothing if deletion is refused."""
        mine = [file for file in self.list_newest_first() if (file.execution, file.kind) == (self.execution, SAVED)]
        delete_run_files(mine[kept:])

    def write_note(self, kind: str, step: int, text: str = "") -> None:
        """Write a small file for this attempt to the store, with a text or else the kind as its content."""
        content = text or kind  # some stores take no empty file
        storage.write_file(self.new_file(kind, step).address, content.encode(errors="replace"))

    def new_file(self, kind: str, step: int, epoch: int = 0) -> RunFile:
        """Return the RunFile for a new file of this attempt, with the present time; write nothing."""
        return RunFile(f"{self.folder}/{self.execution}", kind, self.attempt, step, epoch, int(time.time()))


def list_run_files(folder: str) -> list[RunFile]:
    """Return what the addresses of all runs' files below a folder of the store say; [] if the folder is missing."""
    try:
        names = [file.name for file in storage.list_files(folder)]
    except MissingError:  # for a path only: a missing prefix of a bucket is empty
        return []
    return [file for name in names if (file := parse_run_file(f"{folder}/{name}")) is not None]


def delete_run_files(files: list[RunFile]) -> None:
    """Delete files of the store; stop without an error if the store refuses, or another pod has deleted one of them."""
    with suppress(UnavailableError):
        storage.delete_files([file.address for file in files])
