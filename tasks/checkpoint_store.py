"""A run's checkpoints in the blob store, for the next attempt, and for other executions of the same run.

With flytekit's own checkpoints an attempt sees only those of the attempt before it, and a new execution none. Here each
attempt writes files under its own names, so that two at the same time never mix, and begins with the newest checkpoint
of any that can be read. The files of a run are BASE/RUN/EXECUTION/KIND-ATTEMPT-STEP-EPOCH-TIME.
"""

import os
import posixpath
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Optional, TypeVar

from flytekit import FlyteContextManager

from flyte_ddp.errors import OutOfMemoryError, RankError, RankLostError, UnreachableError, UserError
from flyte_ddp.runs import checkpoint
from flyte_ddp.runs.checkpoint import Checkpoint
from tasks import pods

SAVED = "saved"  # a checkpoint; the other kinds of files are notes of a few bytes
STARTED = "started"  # the attempt has its data, and launches its ranks
TRAINED = "trained"  # it has trained for so long that there should be a checkpoint, and there is none
FAILED = "failed"  # a rank of it failed, which may happen again; with the reason
ENDED = "ended"  # it was told to stop, or could not reach something; with the reason
DONE = "done"  # it has a result
KINDS = (SAVED, STARTED, TRAINED, FAILED, ENDED, DONE)
KEPT = 2  # checkpoints of an execution
DONE_SECONDS = 3600.0  # an execution with a result may still be handing it over
FUTILE_ATTEMPTS = 2  # which failed or had time to save, and made no progress; there is no third
LOST_ATTEMPTS = 5  # which were lost before that, likewise: about as many as a pod whose memory runs out should cost
AT_ONCE = 1000  # files that one request removes
PAUSES = (1.0, 4.0, 10.0)  # seconds between tries; within the time that a pod has after SIGTERM
Returned = TypeVar("Returned")


class Entry(NamedTuple):
    """A file of a run."""

    folder: str  # of the run's execution
    kind: str
    attempt: int  # that wrote it, from 0
    step: int
    epoch: int
    time: int  # since 1970, in seconds

    @property
    def path(self) -> str:
        """The file's address."""
        return f"{self.folder}/{self.kind}-{self.attempt}-{self.step}-{self.epoch}-{self.time}"

    @property
    def execution(self) -> str:
        """The id of the execution that wrote it."""
        return posixpath.basename(self.folder)

    @classmethod
    def at(cls, path: str) -> Optional["Entry"]:
        """Parses a file's name; None for a file that is none of ours."""
        folder, name = posixpath.split(path)
        kind, *numbers = name.split("-")
        if kind not in KINDS or len(numbers) != 4 or not all(map(str.isdecimal, numbers)):
            return None
        attempt, step, epoch, seconds = map(int, numbers)
        return cls(folder, kind, attempt, step, epoch, seconds)


@dataclass(frozen=True)
class CheckpointStore:
    """The files of one run, for an attempt at it.

    Args:
        files: of the blob store, as fsspec has it.
        folder: of the run.
        execution: the id of this one.
        attempt: the number of this one in it, from 0.
        days: after which a file is removed.
        from_scratch: whether checkpoints of other executions are passed over.
    """

    files: Any
    folder: str
    execution: str
    attempt: int
    days: float = 14.0
    from_scratch: bool = False

    @classmethod
    def of_this_pod(cls, run: str) -> "CheckpointStore":
        """The one that the pod's environment names."""
        access = FlyteContextManager.current_context().file_access
        address = os.environ.get(pods.CHECKPOINTS_VARIABLE) or beside_outputs(access.raw_output_prefix)
        variables = [os.environ[f"FLYTE_INTERNAL_EXECUTION_{name}"] for name in ("PROJECT", "DOMAIN", "ID")]
        project, domain, execution = variables
        return cls(
            files=access.get_filesystem_for_path(address),
            folder=posixpath.join(address, project, domain, run),
            execution=execution,
            attempt=int(os.environ.get("FLYTE_ATTEMPT_NUMBER") or 0),
            days=float(os.environ.get(pods.CHECKPOINT_DAYS_VARIABLE) or cls.days),
            from_scratch=bool(os.environ.get(pods.FROM_SCRATCH_VARIABLE)),
        )

    def begin(self, path: Path) -> Checkpoint | None:
        """Download the newest checkpoint that can be read to ``path``, unless the folder there has one as new.

        Prints which checkpoint is used, and which ones cannot be read.

        Returns:
            The newest checkpoint in that folder; None if there is none, there and in the store.

        Raises:
            UserError: the store may not be read, or it has checkpoints and none can be read, or one attempt after the
                other got no further than where it began.
            UnreachableError: the store did not answer in several tries, or its files were replaced meanwhile.
        """
        try:
            entries = tried(self.listed)
        except PermissionError as error:
            raise UserError(
                f"{self.folder}: {error}; whether there is a checkpoint is not known: allow pods to list, read and "
                f"write files there, or set {pods.CHECKPOINTS_VARIABLE} to where they may, and register again"
            ) from error
        newest = self.fetch_newest(entries, path)
        self.stop_if_futile(entries, newest.step if newest else 0)
        return newest

    def listed(self) -> list[Entry]:
        """The run's files that matter to this execution, newest checkpoints first."""
        entries = self.entries_in(self.folder)
        done = {entry.execution for entry in entries if entry.kind == DONE} - {self.execution}
        found = [entry for entry in entries if entry.execution not in done]
        if self.from_scratch:
            found = [entry for entry in found if entry.execution == self.execution]
        return sorted(found, key=lambda entry: (entry.step, entry.epoch, entry.time), reverse=True)

    def sweep(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Remove the files of all runs in this project that nobody will continue, many by each request.

        Args:
            stopped: asked before each request; True ends the sweep.
        """
        now = time.time()
        entries = self.entries_in(posixpath.dirname(self.folder))
        done = {entry.folder for entry in entries if entry.kind == DONE and now - entry.time > DONE_SECONDS}
        old = [entry.path for entry in entries if entry.folder in done or now - entry.time > self.days * 86_400]
        for first in range(0, len(old), AT_ONCE):
            if stopped():
                return
            with suppress(OSError):  # that is not allowed, or someone else has removed one of them
                self.files.rm(old[first : first + AT_ONCE])

    def entries_in(self, folder: str) -> list[Entry]:
        """The files below a folder."""
        self.files.invalidate_cache()
        return [entry for path in self.files.find(folder) if (entry := Entry.at(path)) is not None]

    def fetch_newest(self, entries: list[Entry], path: Path) -> Checkpoint | None:
        """Download the newest checkpoint that can be read; see :meth:`begin`."""
        newest, unreadable = checkpoint.find_newest(path.parent)  # where Elastic has restarted the ranks
        reasons = {str(local): why for local, why in unreadable.items()}
        replaced = False
        for entry in entries:
            if entry.kind != SAVED or (newest and (entry.step, entry.epoch) <= (newest.step, newest.epoch)):
                continue
            try:
                newest = self.fetch(entry, path)
            except FileNotFoundError:  # its attempt has removed it, as there are newer ones
                replaced = True
            except (PermissionError, checkpoint.UnreadableError) as error:
                reasons[entry.path] = str(error)
            else:
                print(f"found the checkpoint of attempt {entry.attempt} of {entry.execution}", flush=True)
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

    def fetch(self, entry: Entry, path: Path) -> Checkpoint:
        """Download a checkpoint in place of the file ``path``, if it can be read, and return it.

        Raises:
            FileNotFoundError, PermissionError: of the store.
            UnreachableError: the store did not answer in several tries.
            UnreadableError: it is damaged, or of another release's format.
        """
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            tried(partial(self.files.get_file, entry.path, str(temporary)))
            found = checkpoint.read(temporary)
            assert found is not None
            temporary.replace(path)
            return replace(found, path=path)
        finally:
            temporary.unlink(missing_ok=True)

    def stop_if_futile(self, entries: list[Entry], step: int) -> None:
        """Refuse another attempt after those that began at the newest checkpoint and made no progress.

        An attempt counts when a rank of it failed, or when it had time to save: two are enough. One that was lost
        before, with or without its pod, may have been unlucky, or its pod ran out of memory, which only Kubernetes
        knows: of these, five are enough. One that was lost while it fetched its data, was told to stop, or could not
        reach something does not count.

        Raises:
            UserError: there were enough.
        """
        attempts: dict[int, dict[str, Entry]] = defaultdict(dict)
        for entry in entries:  # of an attempt's starts the first, at the lowest step, counts
            if entry.execution == self.execution and entry.attempt < self.attempt and entry.kind != SAVED:
                attempts[entry.attempt][entry.kind] = entry
        began_here = [
            notes for _, notes in sorted(attempts.items()) if STARTED in notes and notes[STARTED].step >= step
        ]
        futile = [notes.get(FAILED) or notes[TRAINED] for notes in began_here if notes.keys() & {FAILED, TRAINED}]
        lost = [notes for notes in began_here if notes.keys() == {STARTED}]
        if len(futile) >= FUTILE_ATTEMPTS:
            why = tried(lambda: self.files.cat_file(futile[-1].path).decode())
            raise UserError(
                f"{len(futile)} attempts got no further than step {step:,}, where they began, so no other one is made; "
                f"the last one: {why}"
            )
        if len(lost) >= LOST_ATTEMPTS:
            raise UserError(
                f"{len(lost)} attempts were lost, or killed without a word, before they got further than step "
                f"{step:,}, where they began, so no other one is made; Kubernetes says why (kubectl describe pod, or "
                f"the console): if it is OOMKilled, {more_memory()}; else launch it again"
            )

    def started(self, step: int) -> None:
        """Record that the attempt has its data and launches its ranks.

        Raises:
            UnreachableError: the store did not answer in several tries.
            PermissionError: it may not be written to.
        """
        tried(partial(self.note, STARTED, step))

    def send(self, path: Path) -> None:
        """Uploads a checkpoint, and removes what newer ones of this execution have replaced.

        Raises:
            FileNotFoundError: it is not there any more.
        """
        found = checkpoint.read(path)
        if found is None:
            raise FileNotFoundError(path)
        self.files.put_file(str(path), self.entry(SAVED, found.step, found.epoch).path)
        self.keep_newest(KEPT)

    def end(self, error: BaseException | None) -> None:
        """Record how the attempt has ended, unless that says nothing of the run: a rank of it was lost."""
        if error is None:
            self.note(DONE, 0)
            self.keep_newest(1)  # until Flyte has the result: this pod may be lost before
        elif isinstance(error, OutOfMemoryError):
            self.note(FAILED, 0, f"{error}; {more_memory()}")
        elif not isinstance(error, RankLostError):
            self.note(FAILED if isinstance(error, RankError) else ENDED, 0, str(error))

    def keep_newest(self, number: int) -> None:
        """Removes all but the newest checkpoints of this execution."""
        mine = [entry for entry in self.listed() if (entry.execution, entry.kind) == (self.execution, SAVED)]
        for entry in mine[number:]:
            self.remove(entry)

    def note(self, kind: str, step: int, text: str = "") -> None:
        """Writes a small file, which some stores do not take if it is empty."""
        self.files.pipe_file(self.entry(kind, step).path, (text or kind).encode(errors="replace"))

    def remove(self, entry: Entry) -> None:
        """Removes a file, if that is allowed and no one else has removed it."""
        with suppress(OSError):
            self.files.rm_file(entry.path)

    def entry(self, kind: str, step: int, epoch: int = 0) -> Entry:
        """Names a new file of this attempt."""
        return Entry(posixpath.join(self.folder, self.execution), kind, self.attempt, step, epoch, int(time.time()))


def more_memory() -> str:
    """Return what helps against a lack of memory, with what the pod has."""
    name = pods.chosen_profile()
    given = f"profile {name!r} gives {pods.PROFILES[name].memory} of memory"
    return f"{given}: take one with more, fewer num_ranks, or a smaller batch_size"


def beside_outputs(raw_output_prefix: str) -> str:
    """An address that all executions share: Flyte gives an attempt PREFIX/XX/EXECUTION-NODE-ATTEMPT for its outputs."""
    return posixpath.join(posixpath.dirname(posixpath.dirname(raw_output_prefix.rstrip("/"))), "flyte-ddp-checkpoints")


def tried(action: Callable[[], Returned]) -> Returned:
    """The result of an action, which is tried several times.

    Raises:
        UnreachableError: none of them went well.
        PermissionError, FileNotFoundError: another try would end likewise.
    """
    for pause in (*PAUSES, None):
        try:
            return action()
        except (PermissionError, FileNotFoundError):
            raise
        except Exception as error:
            if pause is None:
                raise UnreachableError(
                    f"checkpoints in the blob store: {error}; the same run will try again"
                ) from error
            print(f"checkpoints in the blob store: {error}; next try in {pause:g} s", flush=True)
            time.sleep(pause)
    raise AssertionError
