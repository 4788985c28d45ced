"""Which failures of a task are worth another attempt, and checkpoints that outlive the pod of an attempt."""

import contextvars
import os
import posixpath
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from flyte_ddp.errors import MachineError, RankError, StoppedError, UnreachableError
from flyte_ddp.pods import environment
from flyte_ddp.pods.checkpoint_store import TRAINED, CheckpointStore
from flyte_ddp.pods.platforms import Platform, execution_names, is_in_pod, storage_address
from flyte_ddp.pods.profiles import PROFILE_VARIABLE, chosen_profile, parse_bytes
from flyte_ddp.process import postpone_signal, signal_handlers
from flyte_ddp.runs.checkpoint import FOLDER, SLOTS, Checkpoint
from flyte_ddp.runs.run_folder import METRICS, release_reserved_folders
from flyte_ddp.settings import Settings, read_number, read_settings, read_text
from flyte_ddp.storage import ForbiddenError

POLL_SECONDS = 0.5  # between two looks for new checkpoints
SWEEP_SECONDS = 30.0  # limit for deleting abandoned files at the end of a pod that has its result
COUNT_SECONDS = 0.3  # limit for adding up files: an evicted pod gets SIGTERM one second before SIGKILL
START = b'"kind": "start"'  # in metrics.jsonl: training begins, for the first time or again


class Sigterm(BaseException):
    """SIGTERM came before or after training, which handles the signal itself. No ``except Exception`` catches it."""


def raise_sigterm(*_: object) -> None:
    raise Sigterm


@contextmanager
def raise_retryable_errors(platform: Platform) -> Iterator[None]:
    """In a pod, raise the platform's retryable error in place of an exception after which a retry may succeed.

    Handles SIGTERM in the block, in the main thread: in a local run it raises StoppedError. After any exception,
    unlocks the run folders that this thread has reserved. Raises UserError in a pod with an unregistered library.
    """
    with signal_handlers({signal.SIGTERM: raise_sigterm}):
        try:
            if is_in_pod():
                environment.refuse_unregistered_code()
            yield
        except BaseException as error:
            release_reserved_folders()  # no training will follow
            if not isinstance(error, (MachineError, RankError, StoppedError, UnreachableError, Sigterm)):
                raise
            failure = StoppedError("SIGTERM", step=None) if isinstance(error, Sigterm) else error
            if not is_in_pod() or (isinstance(failure, RankError) and not failure.recoverable):
                raise failure from failure.__cause__  # a rank's own traceback, for the pod's log
            evicted = explain_eviction(platform.disk_limit()) if isinstance(failure, StoppedError) else ""
            raise platform.retryable_error(f"{failure}{evicted}") from error


def explain_eviction(limit: str) -> str:
    """Return a clause for an error if this pod's files exceed ``limit``, so that Kubernetes evicts it; else ""."""
    if not limit:
        return ""
    deadline, most, taken = time.monotonic() + COUNT_SECONDS, parse_bytes(limit), 0
    for folder in {Path.cwd(), Path(tempfile.gettempdir())}:
        for place, _, files in os.walk(folder):
            for file in files:
                with suppress(FileNotFoundError):  # removed since the folder was listed
                    taken += os.lstat(f"{place}/{file}").st_blocks * 512  # st_blocks counts units of 512 bytes
                if taken > most:
                    cause = f"its files take more than its {limit} of disk (ephemeral-storage), so Kubernetes evicts it"
                    return f"; {cause}: give it more, by a profile or the task's ephemeral_storage"
            if time.monotonic() > deadline:
                return ""
    return ""


@contextmanager
def sync_checkpoints(
    platform: Platform,
    run: str,
    work: Path,
    *,
    own_function: bool = False,
    defer: Callable[[Callable[[], None]], object] = lambda record: record(),
) -> Iterator[Callable[[], None]]:
    """Download the run's newest checkpoint, and upload new checkpoints during the block; do nothing outside pods.

    Yields a function that records that ranks are launched: call it when the data are there. ``work`` is the folder in
    which the run ``run`` writes. ``own_function``: a user's function runs, which need not save. The end of the block
    waits for the last upload. ``defer`` gets :func:`record_result`, to call it when the outputs are written.
    """
    if not is_in_pod():
        yield lambda: None
        return
    folder = work / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    advice = "request more for the task (mem)" if own_function else profile_memory_advice()
    store = open_checkpoint_store(platform, run, advice)
    with postpone_signal(signal.SIGTERM):
        newest = store.download_newest_checkpoint(folder / SLOTS[0])
    uploader = CheckpointUploader(store, folder, read_settings(), newest)
    uploader.saved_or_recorded = own_function  # so that it does not take a missing checkpoint for a failure

    def record_attempt_start() -> None:
        try:
            store.record_attempt_start(newest.step if newest else 0)
        except ForbiddenError as error:
            lost = "without checkpoints there, a lost pod loses all that it has done"
            print(f"{store.folder}: {error}; {lost}", flush=True)

    thread = start_thread_in_context("uploader", uploader.upload_until_stopped)
    failure: BaseException | None = None
    try:
        yield record_attempt_start
    except BaseException as error:
        failure = error
        raise
    finally:
        uploader.stop.set()
        thread.join()
        uploader.upload_changed_checkpoints()
        if failure is None:
            defer(partial(record_result, store))
        else:
            with suppress(Exception):
                store.record_attempt_end(failure)


def record_result(store: CheckpointStore) -> None:
    """Record that a run has its result, and delete abandoned files for up to 30 s; raise nothing."""
    with suppress(Exception):  # the result counts even if the blob store does not answer
        store.record_attempt_end(None)
    # In a thread, which a request that gets no answer does not hold up.
    sweep = partial(store.delete_abandoned_files, SWEEP_SECONDS)
    start_thread_in_context("sweep", sweep, daemon=True).join(SWEEP_SECONDS)


def open_checkpoint_store(platform: Platform, run: str, memory_advice: str) -> CheckpointStore:
    project, domain, execution = execution_names()
    return CheckpointStore(
        posixpath.join(checkpoints_address(platform.output_address()), project, domain, run),
        execution=execution,
        attempt=int(os.environ.get("FLYTE_ATTEMPT_NUMBER") or 0),
        days=read_number("FLYTE_DDP_CHECKPOINT_DAYS"),
        from_scratch=bool(os.environ.get(environment.FROM_SCRATCH_VARIABLE)),
        memory_advice=memory_advice,
    )


def checkpoints_address(output_address: str) -> str:
    """Return the address of all checkpoints: FLYTE_DDP_CHECKPOINTS, or PREFIX/flyte-ddp-checkpoints.

    ``output_address``, below which an attempt writes its outputs, is PREFIX/XX/EXECUTION-NODE-ATTEMPT.
    """
    beside = f"{posixpath.dirname(posixpath.dirname(output_address.rstrip('/')))}/flyte-ddp-checkpoints"
    return storage_address(read_text("FLYTE_DDP_CHECKPOINTS") or beside)


def profile_memory_advice() -> str:
    given = f"profile {read_text(PROFILE_VARIABLE)!r} gives {chosen_profile().memory} of memory"
    return f"{given}: take one with more, fewer num_ranks, or a smaller batch_size"


def start_thread_in_context(name: str, work: Callable[[], None], *, daemon: bool = False) -> threading.Thread:
    """Start and return a thread that has a copy of this thread's context variables, as flytekit's functions need."""
    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), name=name, daemon=daemon)
    thread.start()
    return thread


class CheckpointUploader:
    """Uploads new checkpoints of an attempt, and records if none comes although it is time for one."""

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
        while not self.stop.wait(POLL_SECONDS):
            self.upload_changed_checkpoints()
            with suppress(Exception):  # the blob store does not answer, or the file is being replaced
                self.record_missing_checkpoint()

    def upload_changed_checkpoints(self) -> None:
        """Upload the checkpoints that have changed since their last upload; print the first failure, raise none."""
        # The later of two saves of one step last: it replaces the other, or is the newer one.
        for name in sorted(SLOTS, key=lambda name: (self.file_version(name) or (0, 0))[1]):
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

    def record_missing_checkpoint(self) -> None:
        """Record, once, that training has had time for a checkpoint and none was uploaded."""
        seconds = self.settings.timeout + self.settings.checkpoint_seconds
        if self.saved_or_recorded or not self.settings.checkpoint_seconds:
            return
        if self.training_since is None:
            metrics = (self.folder.parent / METRICS).read_bytes()
            if metrics.count(START) > self.starts_before:
                self.training_since = time.monotonic()
        elif time.monotonic() - self.training_since > seconds:
            self.store.write_note(TRAINED, text=f"it trained for {seconds:g} s, and no checkpoint came here")
            self.saved_or_recorded = True

    def file_version(self, name: str) -> tuple[int, int] | None:
        """Return inode and time of change (ns) of a file in the folder, which a new file changes; None if missing."""
        with suppress(FileNotFoundError):
            status = (self.folder / name).stat()
            return status.st_ino, status.st_mtime_ns
        return None
