"""A run's checkpoints in the blob store, for the next attempt, and for other executions of the same run.

Each attempt writes files under its own names, so that two at the same time never mix, and begins with the newest
checkpoint of any that can be read. The files of a run are BASE/RUN/EXECUTION/KIND-ATTEMPT-STEP-EPOCH-TIME.
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

SAVED = "saved"  # a checkpoint; the other kinds of files are notes of a few bytes
STARTED = "started"  # the attempt has its data, and launches its ranks
TRAINED = "trained"  # it has trained for so long that there should be a checkpoint, and there is none
FAILED = "failed"  # a rank of it failed, which may happen again; with the reason
ENDED = "ended"  # it was told to stop, or could not reach something; with the reason
DONE = "done"  # it has a result
ADDRESS = re.compile(rf"(.+)/({SAVED}|{STARTED}|{TRAINED}|{FAILED}|{ENDED}|{DONE})-(\d+)-(\d+)-(\d+)-(\d+)")
KEPT = 2  # checkpoints of an execution
DONE_SECONDS = 3600.0  # an execution with a result may still be handing it over
FUTILE_ATTEMPTS = 2  # which failed or had time to save, and made no progress; there is no third
LOST_ATTEMPTS = 5  # which were lost before that, likewise: about as many as a pod whose memory runs out should cost
AT_ONCE = 1000  # files that one request removes
Result = TypeVar("Result")


class Entry(NamedTuple):
    """A file of a run."""

    folder: str  # address of the run's execution
    kind: str
    attempt: int  # that wrote it, from 0
    step: int
    epoch: int
    time: int  # since 1970, in seconds

    @property
    def address(self) -> str:
        """The file's address."""
        return f"{self.folder}/{'-'.join(map(str, self[1:]))}"

    @property
    def execution(self) -> str:
        """The id of the execution that wrote the file."""
        return posixpath.basename(self.folder)


def parse_entry(address: str) -> Entry | None:
    """Return what an address says of its file; None for a file that is none of a run's."""
    match = ADDRESS.fullmatch(address)
    return Entry(match[1], match[2], *map(int, match.groups()[2:])) if match else None


@dataclass(frozen=True)
class CheckpointStore:
    """The files of one run, for an attempt at it; methods raise UnavailableError unless they say otherwise."""

    folder: str  # address of the run: a path, s3://, gs:// or az://
    execution: str  # id of the one that the attempt belongs to
    attempt: int = 0  # number of the attempt in its execution
    days: float = 14.0  # age at which a file is removed
    from_scratch: bool = False  # whether checkpoints of other executions are passed over
    more_memory: str = "give it more memory"  # advice for an attempt whose memory ran out

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
            entries = self.ask(self.folder, lambda _: self.list_newest_first())
        except UnavailableError as error:
            raise UserError(
                f"{self.folder}: {error}; whether there is a checkpoint is not known: allow pods to list, read and "
                "write files there, or set FLYTE_DDP_CHECKPOINTS to where they may, and register again"
            ) from error
        newest = self.fetch_newest(entries, path)
        self.stop_if_futile(entries, newest.step if newest else 0)
        return newest

    def ask(self, address: str, action: Callable[[str], Result]) -> Result:
        """Return the result of an action on an address, tried several times; prints why it is tried again.

        Raises:
            UnavailableError: another try would end likewise.
            UnreachableError: no try succeeded.
        """
        try:
            return storage.retried(address, action, lambda note: print(f"checkpoints: {note}", flush=True))
        except UnavailableError as error:
            if not error.transient:
                raise
            raise UnreachableError(f"checkpoints in {address}: {error}; the same run will try again") from error

    def list_newest_first(self) -> list[Entry]:
        """Return the run's files that matter to this execution, newest checkpoints first."""
        entries = list_entries(self.folder)
        done = {entry.execution for entry in entries if entry.kind == DONE} - {self.execution}
        found = [entry for entry in entries if entry.execution not in done]
        if self.from_scratch:
            found = [entry for entry in found if entry.execution == self.execution]
        return sorted(found, key=lambda entry: (entry.step, entry.epoch, entry.time), reverse=True)

    def sweep(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Delete the files of all runs in this project that nobody will continue, AT_ONCE until ``stopped()``."""
        now = time.time()
        entries = list_entries(posixpath.dirname(self.folder))
        done = {entry.folder for entry in entries if entry.kind == DONE and now - entry.time > DONE_SECONDS}
        old = [entry for entry in entries if entry.folder in done or now - entry.time > self.days * 86_400]
        for first in range(0, len(old), AT_ONCE):
            if stopped():
                return
            delete_entries(old[first : first + AT_ONCE])

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
            except MissingError:  # its attempt has removed it, as there are newer ones
                replaced = True
            except (UnavailableError, checkpoint.UnreadableError) as error:
                reasons[entry.address] = str(error)
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
            UnreachableError: the store did not answer in several tries.
            UnreadableError: the checkpoint is damaged, or of another release's format.
        """
        temporary = path.with_name(f".{path.name}.tmp")

        def download(address: str) -> None:
            with storage.open_file(address) as content, temporary.open("wb") as file:
                storage.check_length(sum(map(file.write, content.chunks)), content.size, remote=True)

        try:
            self.ask(entry.address, download)
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

        Args:
            entries: files of the run, newest checkpoints first.
            step: of the newest checkpoint, 0 without one.

        Raises:
            UserError: there were enough.
        """
        attempts: dict[int, dict[str, Entry]] = defaultdict(dict)
        for entry in entries:  # of an attempt's starts the first, at the lowest step, counts
            if entry.execution == self.execution and entry.attempt < self.attempt and entry.kind != SAVED:
                attempts[entry.attempt][entry.kind] = entry
        in_order = [notes for _, notes in sorted(attempts.items()) if STARTED in notes]
        began_here = [notes for notes in in_order if notes[STARTED].step >= step]
        futile = [notes.get(FAILED) or notes[TRAINED] for notes in began_here if notes.keys() & {FAILED, TRAINED}]
        lost = [notes for notes in began_here if notes.keys() == {STARTED}]
        if len(futile) >= FUTILE_ATTEMPTS:
            why = self.ask(futile[-1].address, storage.read).decode()
            raise UserError(
                f"{len(futile)} attempts got no further than step {step:,}, where they began, so no other one is made; "
                f"the last one: {why}"
            )
        if len(lost) >= LOST_ATTEMPTS:
            raise UserError(
                f"{len(lost)} attempts were lost, or killed without a word, before they got further than step "
                f"{step:,}, where they began, so no other one is made; Kubernetes says why (kubectl describe pod, or "
                f"the console): if it is OOMKilled, {self.more_memory}; else launch it again"
            )

    def started(self, step: int) -> None:
        """Record, in several tries, that the attempt has its data and launches its ranks from this step on."""
        self.ask(self.folder, lambda _: self.note(STARTED, step))

    def send(self, path: Path) -> None:
        """Upload a checkpoint, and delete those of this execution but the two newest; FileNotFoundError without it."""
        found = checkpoint.read(path)
        if found is None:
            raise FileNotFoundError(path)
        storage.put(self.new_entry(SAVED, found.step, found.epoch).address, path)
        self.keep_newest(KEPT)

    def end(self, error: BaseException | None) -> None:
        """Record how the attempt has ended, unless that says nothing of the run: a rank of it was lost."""
        if error is None:
            self.note(DONE, 0)
            self.keep_newest(1)  # until the platform has the result: this pod may be lost before
        elif isinstance(error, OutOfMemoryError):
            self.note(FAILED, 0, f"{error}; {self.more_memory}")
        elif not isinstance(error, RankLostError):
            self.note(FAILED if isinstance(error, RankError) else ENDED, 0, str(error))

    def keep_newest(self, number: int) -> None:
        """Delete all but the newest checkpoints of this execution, if that is allowed."""
        mine = [entry for entry in self.list_newest_first() if (entry.execution, entry.kind) == (self.execution, SAVED)]
        delete_entries(mine[number:])

    def note(self, kind: str, step: int, text: str = "") -> None:
        """Write a small file; some stores do not take an empty one, so the kind is the text of one without any."""
        storage.put(self.new_entry(kind, step).address, (text or kind).encode(errors="replace"))

    def new_entry(self, kind: str, step: int, epoch: int = 0) -> Entry:
        """Return the name of a new file of this attempt."""
        return Entry(f"{self.folder}/{self.execution}", kind, self.attempt, step, epoch, int(time.time()))


def list_entries(folder: str) -> list[Entry]:
    """Return the files of runs below a folder, which need not be there."""
    try:
        names = [entry.name for entry in storage.list_files(folder)]
    except MissingError:  # on this machine; a bucket has no folders
        return []
    return [entry for name in names if (entry := parse_entry(f"{folder}/{name}")) is not None]


def delete_entries(entries: list[Entry]) -> None:
    """Delete files, if that is allowed and nobody else has deleted one of them."""
    with suppress(UnavailableError):
        storage.delete([entry.address for entry in entries])
