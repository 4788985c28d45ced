"""A run's checkpoints in the blob store, for the next attempt, and for other executions of the same run.

With flytekit's own checkpoints an attempt sees only those of the attempt before it, and a new execution none. Here each
attempt writes files under its own names, so that two at the same time never mix, and begins with the newest whole
checkpoint of any. The files of a run are BASE/RUN/EXECUTION/KIND-ATTEMPT-STEP-EPOCH-TIME.
"""

import os
import posixpath
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Optional, TypeVar

from flytekit import FlyteContextManager

from flyte_ddp.errors import UnreachableError, UserError
from flyte_ddp.runs import checkpoint
from tasks import pods

SAVED, STARTED, ENDED, DONE = "saved", "started", "ended", "done"  # kinds of files
KEPT = 2  # checkpoints of an execution
DONE_SECONDS = 3600.0  # an execution with a result may still be handing it over
FUTILE_ATTEMPTS = 2  # without progress; there is no third
NOTHING_SAID = "it was killed, as a pod is that runs out of memory"
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
        if kind not in (SAVED, STARTED, ENDED, DONE) or len(numbers) != 4 or not all(map(str.isdecimal, numbers)):
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

    def begin(self, path: Path) -> None:
        """Downloads the newest whole checkpoint to ``path``, if there is one, and records where this attempt begins.

        Raises:
            UserError: one attempt after the other got no further than where it began.
            UnreachableError: the store did not answer in several tries.
            PermissionError: it may not be read, or not be written to.
        """
        entries = tried(self.listed)
        step = self.fetch_newest(entries, path)
        self.stop_if_futile(entries, step)
        tried(partial(self.note, STARTED, step))

    def listed(self) -> list[Entry]:
        """The run's files that matter to this execution, newest checkpoints first."""
        entries = self.entries_in(self.folder)
        done = {entry.execution for entry in entries if entry.kind == DONE} - {self.execution}
        found = [entry for entry in entries if entry.execution not in done]
        if self.from_scratch:
            found = [entry for entry in found if entry.execution == self.execution]
        return sorted(found, key=lambda entry: (entry.step, entry.epoch, entry.time), reverse=True)

    def sweep(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Removes the files of all runs in this project that nobody will continue, until it is stopped."""
        now = time.time()
        entries = self.entries_in(posixpath.dirname(self.folder))
        done = {entry.folder for entry in entries if entry.kind == DONE and now - entry.time > DONE_SECONDS}
        for entry in entries:
            if stopped():
                return
            if entry.folder in done or now - entry.time > self.days * 86_400:
                self.remove(entry)

    def entries_in(self, folder: str) -> list[Entry]:
        """The files below a folder."""
        self.files.invalidate_cache()
        return [entry for path in self.files.find(folder) if (entry := Entry.at(path)) is not None]

    def fetch_newest(self, entries: list[Entry], path: Path) -> int:
        """Downloads the newest checkpoint that is whole, unless it is here; returns its step, 0 if there is none."""
        here = checkpoint.newest_of(path.parent)  # where Elastic has restarted the ranks
        for entry in entries:
            if entry.kind == SAVED and (here is None or (entry.step, entry.epoch) > (here.step, here.epoch)):
                with suppress(FileNotFoundError):  # its attempt has just replaced it
                    tried(partial(self.files.get_file, entry.path, str(path)))
                    if checkpoint.read(path) is not None:
                        print(f"found the checkpoint of attempt {entry.attempt} of {entry.execution}", flush=True)
                        return entry.step
                    print(f"{entry.path} is damaged; the one before it is taken", flush=True)
                    path.unlink(missing_ok=True)
        found = checkpoint.newest_of(path.parent)
        return found.step if found else 0

    def stop_if_futile(self, entries: list[Entry], step: int) -> None:
        """Refuses another attempt after some that made no progress; see :meth:`begin`."""
        mine = [entry for entry in entries if entry.execution == self.execution and entry.attempt < self.attempt]
        began = {entry.attempt: entry.step for entry in mine if entry.kind == STARTED}  # the first time
        last = sorted(began)[-FUTILE_ATTEMPTS:]
        if len(last) < FUTILE_ATTEMPTS or any(began[attempt] < step for attempt in last):
            return
        ends = [entry for entry in mine if (entry.kind, entry.attempt) == (ENDED, last[-1])]
        why = tried(lambda: self.files.cat_file(ends[0].path).decode()) if ends else NOTHING_SAID
        if "memory" in why:
            name = pods.chosen_profile()
            given = f"profile {name!r} gives {pods.PROFILES[name].memory}"
            why += f"; {given}: take one with more, fewer num_ranks, or a smaller batch_size"
        raise UserError(
            f"{FUTILE_ATTEMPTS} attempts got no further than step {step:,}, where they began, so no other one is made; "
            f"the last one: {why}"
        )

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
        """Records how the attempt has ended: with a result, or with an error."""
        if error is None:
            self.note(DONE, 0)
            self.keep_newest(1)  # until Flyte has the result: this pod may be lost before
        else:
            self.note(ENDED, 0, str(error))

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
