"""Which failures of a task are worth another attempt, and checkpoints that outlive the pod of an attempt."""

import contextvars
import os
import posixpath
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flyte_ddp.errors import RankError, StoppedError, UnreachableError
from flyte_ddp.pods import environment
from flyte_ddp.pods.checkpoint_store import TRAINED, CheckpointStore
from flyte_ddp.pods.eviction import eviction_reason
from flyte_ddp.pods.platforms import Platform, execution_names, is_in_pod, storage_address
from flyte_ddp.pods.profiles import PROFILE_VARIABLE, chosen_profile
from flyte_ddp.process import postpone_signal, signal_handlers
from flyte_ddp.runs.checkpoint import FOLDER, SLOTS, Checkpoint
from flyte_ddp.runs.run_folder import METRICS, UNFINISHED
from flyte_ddp.runs.run_lock import release_reserved_folders
from flyte_ddp.settings import Settings, read_number, read_settings, read_text
from flyte_ddp.storage import ForbiddenError

POLL_SECONDS = 0.5
SWEEP_SECONDS = 30.0  # limit for deleting abandoned files at the end of a pod that has its result
START = b'"kind": "start"'  # in metrics.jsonl: training begins, for the first time or again


class Sigterm(BaseException):
    """SIGTERM came before or after training, which handles the signal itself. No ``except Exception`` catches it."""


def raise_sigterm(*_: object) -> None:
    """Raise Sigterm: the handler of the signal."""
    raise Sigterm


@contextmanager
def translate_errors(platform: Platform) -> Iterator[None]:
    """In a pod, replace an exception of the block that may not occur again by the platform's retryable error.

    Such exceptions are an UnreachableError, SIGTERM, and a RankError with ``recoverable``. In the main thread, sets a
    handler of SIGTERM for the block. First compares the pod's code with the registered code. After any exception,
    unlocks the run folders that this thread has reserved.

    Raises:
        StoppedError: SIGTERM, in a local run.
        UserError: the registered library is another one than the pod's.
    """
    with signal_handlers({signal.SIGTERM: raise_sigterm}):
        try:
            environment.check_pod_code()
            yield
        except BaseException as error:
            release_reserved_folders()  # no training will follow
            if not isinstance(error, (RankError, StoppedError, UnreachableError, Sigterm)):
                raise
            failure = StoppedError("SIGTERM", step=None) if isinstance(error, Sigterm) else error
            if not is_in_pod() or (isinstance(failure, RankError) and not failure.recoverable):
                raise failure from failure.__cause__  # a rank's own traceback, for the pod's log
            evicted = eviction_reason(platform.disk_limit()) if isinstance(failure, StoppedError) else ""
            raise platform.retryable_error(f"{failure}{evicted}") from error


@contextmanager
def sync_checkpoints(platform: Platform, run_folder: Path) -> Iterator[Callable[[], None]]:
    """In a pod, download the run's newest checkpoint, and upload new checkpoints during the block; do nothing locally.

    SIGTERM is deferred during the download. A thread looks for new checkpoints every POLL_SECONDS; the end of the block
    uploads the last one and records how the attempt ended. After a block without an exception, deletes files of the
    project's runs that nobody will continue, for up to SWEEP_SECONDS.

    Args:
        platform: The platform that runs this task.
        run_folder: Folder of the run.

    Yields:
        A function to call when the data are there and before ranks are launched. It records the start in the store, and
        raises UnreachableError if the store does not answer in several tries.

    Raises:
        UserError: the store may not be read, none of its checkpoints can be read, or earlier attempts made no progress.
        UnreachableError: the store does not answer in several tries, or its checkpoints were replaced meanwhile.
    """
    if not is_in_pod():
        yield lambda: None
        return
    folder = run_folder / UNFINISHED / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    store = open_checkpoint_store(platform, run_folder.name)
    with postpone_signal(signal.SIGTERM):
        newest = store.download_newest(folder / SLOTS[0])
    uploader = CheckpointUploader(store, folder, read_settings(), newest)

    def record_start() -> None:
        """Record in the store that ranks are launched; print if the store may not be written to."""
        try:
            store.record_start(newest.step if newest else 0)
        except ForbiddenError as error:
            lost = "without checkpoints there, a lost pod loses all that it has done"
            print(f"{store.folder}: {error}; {lost}", flush=True)

    thread = start_thread_in_context("uploader", uploader.upload_until_stopped)
    failure: BaseException | None = None
    try:
        yield record_start
    except BaseException as error:
        failure = error
        raise
    finally:
        uploader.stop.set()
        thread.join()
        uploader.upload_changed_checkpoints()
        with suppress(Exception):  # the result counts even if the store does not answer
            store.record_end(failure)
        if failure is None:
            delete_abandoned_files(store)


def open_checkpoint_store(platform: Platform, run: str) -> CheckpointStore:
    """Return the store of a run's checkpoints for this pod's attempt, from the pod's environment."""
    return CheckpointStore(
        posixpath.join(checkpoints_address(platform.output_address()), *execution_names()[:2], run),
        execution=execution_names()[2],
        attempt=int(os.environ.get("FLYTE_ATTEMPT_NUMBER") or 0),
        days=read_number("FLYTE_DDP_CHECKPOINT_DAYS"),
        from_scratch=bool(os.environ.get(environment.FROM_SCRATCH_VARIABLE)),
        memory_advice=memory_advice(),
    )


def checkpoints_address(output_address: str) -> str:
    """Return the address of all checkpoints: FLYTE_DDP_CHECKPOINTS, or a folder beside the platform's outputs.

    Args:
        output_address: PREFIX/XX/EXECUTION-NODE-ATTEMPT, below which Flyte has an attempt write its outputs. The folder
            is in PREFIX.
    """
    beside = f"{posixpath.dirname(posixpath.dirname(output_address.rstrip('/')))}/flyte-ddp-checkpoints"
    return storage_address(read_text("FLYTE_DDP_CHECKPOINTS") or beside)


def memory_advice() -> str:
    """Return advice for a pod whose memory ran out: the profile with its memory, and what to change."""
    given = f"profile {read_text(PROFILE_VARIABLE)!r} gives {chosen_profile().memory} of memory"
    return f"{given}: take one with more, fewer num_ranks, or a smaller batch_size"


def delete_abandoned_files(store: CheckpointStore) -> None:
    """Delete the files of the project's runs that nobody will continue, for up to SWEEP_SECONDS; ignore any error.

    A thread does it. It may still be in a request when this function returns.
    """
    stop = threading.Event()

    def delete_and_ignore_errors() -> None:
        """Delete the files; the next pod repeats what fails."""
        with suppress(Exception):
            store.delete_abandoned_files(stop.is_set)

    start_thread_in_context("sweep", delete_and_ignore_errors, daemon=True).join(SWEEP_SECONDS)
    stop.set()


def start_thread_in_context(name: str, work: Callable[[], None], *, daemon: bool = False) -> threading.Thread:
    """Start a thread with a copy of this thread's context variables, which platforms use, and return the thread."""
    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), name=name, daemon=daemon)
    thread.start()
    return thread


class CheckpointUploader:
    """Uploads new checkpoints of an attempt, and records in the store if none comes although it is time for one."""

    def __init__(self, store: CheckpointStore, folder: Path, settings: Settings, newest: Checkpoint | None) -> None:
        self.store, self.folder, self.settings = store, folder, settings
        self.uploaded = {name: self.file_version(name) for name in SLOTS}  # what is there was downloaded
        # Metrics of the checkpoint tell of trainings before this one, which begins with one more start.
        self.starts_before = newest.metrics.count(START) if newest else 0
        self.training_since: float | None = None
        self.saved_or_recorded = False
        self.stop = threading.Event()
        self.failure_printed = False

    def upload_until_stopped(self) -> None:
        """Upload new checkpoints every POLL_SECONDS until ``stop`` is set."""
        while not self.stop.wait(POLL_SECONDS):
            self.upload_changed_checkpoints()
            with suppress(Exception):  # the store does not answer, or the file is being replaced
                self.record_missing_checkpoint()

    def record_missing_checkpoint(self) -> None:
        """Write a note to the store, once, if there was time for a checkpoint since training began and none came.

        The time is the ranks' time limit, which the first step does not exceed, plus the time between two checkpoints.
        Reads the run's metrics.jsonl whole until training has begun; raises FileNotFoundError without that file.
        """
        seconds = self.settings.timeout + self.settings.checkpoint_seconds
        if self.saved_or_recorded or not self.settings.checkpoint_seconds:
            return
        if self.training_since is None:
            metrics = (self.folder.parent / METRICS).read_bytes()
            if metrics.count(START) > self.starts_before:
                self.training_since = time.monotonic()
        elif time.monotonic() - self.training_since > seconds:
            self.store.write_note(TRAINED, 0, f"it trained for {seconds:g} s, and no checkpoint came here")
            self.saved_or_recorded = True

    def upload_changed_checkpoints(self) -> None:
        """Upload the checkpoints that have changed since the last call.

        Never raises: prints the first failure, and the next call tries again.
        """
        for name in SLOTS:
            # A hard link keeps the content while a newer checkpoint takes the place of this one.
            link = self.folder / ".sending" / name
            try:
                link.parent.mkdir(exist_ok=True)
                link.unlink(missing_ok=True)
                os.link(self.folder / name, link)
                version = self.file_version(f".sending/{name}")
                if self.uploaded.get(name) != version:
                    self.store.upload_checkpoint(link)
                    self.uploaded[name] = version
                    self.saved_or_recorded = True
            except FileNotFoundError:  # no checkpoint yet, or the run is over and has removed them
                continue
            except Exception as error:
                if not self.failure_printed:
                    print(f"checkpoint {name} could not be sent: {error}; training continues", flush=True)
                self.failure_printed = True
            finally:
                link.unlink(missing_ok=True)

    def file_version(self, name: str) -> tuple[int, int] | None:
        """Return inode and time of change (ns) of a file in the folder, which a new file changes; None if missing."""
        with suppress(FileNotFoundError):
            status = (self.folder / name).stat()
            return status.st_ino, status.st_mtime_ns
        return None
