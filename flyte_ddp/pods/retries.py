"""Decide which failures of a task are retried, and keep checkpoints beyond the pod of an attempt."""

import contextvars
import os
import posixpath
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from flyte_ddp.core.errors import MachineError, RankError, StoppedError, UnreachableError, describe_resumption
from flyte_ddp.core.files import get_file_version
from flyte_ddp.core.machine.process import postpone_signal, use_signal_handlers
from flyte_ddp.core.runs.checkpoint import FOLDER, SLOTS
from flyte_ddp.core.settings import Settings, read_number_variable, read_text_variable
from flyte_ddp.pods import environment
from flyte_ddp.pods.checkpoint_store import CheckpointStore
from flyte_ddp.pods.platforms import Platform, convert_to_storage_address, is_in_pod, read_execution_names
from flyte_ddp.pods.wandb_settings import read_run_settings
from flyte_ddp.storage import ForbiddenError

POLL_SECONDS = 0.5  # between two checks for new checkpoints
DELETION_SECONDS = 30.0  # limit for deleting abandoned files at the end of a pod that has its result


class PodTerminated(BaseException):
    """SIGTERM came before or after training. During training, the training handles the signal itself.

    Not a subclass of Exception, so ``except Exception`` does not catch it.
    """


def raise_pod_terminated(*_: object) -> None:
    raise PodTerminated


@contextmanager
def raise_retryable_errors(
    platform: Platform, on_sigterm: Callable[..., object] = raise_pod_terminated
) -> Iterator[None]:
    """In a pod, replace an exception after which a retry may succeed by the platform's retryable error.

    Handles SIGTERM during the block, in the main thread, by ``on_sigterm``. The default raises a retryable error in a
    pod, and StoppedError in a local run. Other exceptions pass unchanged. Before the block, a pod compares the
    library's code with the registered code.

    Raises:
        UserError: The library's code in this pod differs from the registered code.
    """
    with use_signal_handlers({signal.SIGTERM: on_sigterm}):
        try:
            if is_in_pod():
                environment.refuse_unregistered_code()
            yield
        except BaseException as error:
            if not isinstance(error, (MachineError, RankError, StoppedError, UnreachableError, PodTerminated)):
                raise
            failure = StoppedError("SIGTERM", step=None) if isinstance(error, PodTerminated) else error
            if not is_in_pod() or (isinstance(failure, RankError) and not failure.recoverable):
                raise failure from failure.__cause__  # a single rank's traceback, for the pod's log
            resumption = f"\n\n{describe_resumption(failure.step)}" if isinstance(failure, RankError) else ""
            raise platform.retryable_error(f"{failure}{resumption}") from error


@contextmanager
def sync_checkpoints_with_store(
    platform: Platform,
    run_folder: Path,
    output_folder: Path,
    *,
    defer: Callable[[Callable[[], None]], object] = lambda record: record(),
) -> Iterator[Callable[[], Settings]]:
    """In a pod, copy a run's checkpoints from and to the blob store, so that a later attempt can resume.

    Before the block, downloads the run's newest checkpoint, and defers SIGTERM meanwhile. During the block, a thread
    uploads new checkpoints, and prints the first failure. Uploads keep only the execution's 2 newest checkpoints. The
    end of the block waits for the last upload. After an error, the end of the block writes a note with the error.
    Without an error, the function that ``defer`` gets writes the note. Outside of pods, only yields.

    Yields:
        A function to call when the data are available, before the ranks start. The function returns the run's settings.
        In a pod, the function also writes a note that the ranks start, in up to 4 tries with pauses.

    Args:
        platform: The platform that executes this task.
        run_folder: The run's folder, which has the run's name.
        output_folder: Folder to which the ranks write.
        defer: If the block raises no error, its end calls ``defer`` with a function. ``defer`` must call the function
            when the outputs are written. The function writes the note that the attempt has a result, and deletes old
            files of all runs of the project, in up to 30 s. The default calls the function at once.

    Raises:
        UserError: Checkpoints cannot be listed or read, or too many earlier attempts made no progress.
        UnreachableError: The blob store has an outage, or other attempts replaced the checkpoints.
    """
    run = run_folder.name
    if not is_in_pod():
        yield lambda: read_run_settings(platform, run)
        return
    folder = output_folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    store = open_checkpoint_store(platform, run)
    with postpone_signal(signal.SIGTERM):
        newest = store.download_newest_checkpoint(folder / SLOTS[0])
    uploader = CheckpointUploader(store, folder)

    def record_start_and_read_settings() -> Settings:
        """Record in the blob store that this attempt starts its ranks, and return the settings.

        Makes up to 4 tries, with printed pauses. Prints if the blob store forbids the note. May set WANDB_API_KEY.

        Raises:
            UnreachableError: All tries failed by an outage.
        """
        settings = read_run_settings(platform, run)
        try:
            store.record_attempt_start(newest.step if newest else 0)
        except ForbiddenError as error:
            lost = "without checkpoints there, a lost pod loses all its progress"
            print(f"{store.folder}: {error}; {lost}", flush=True)
        return settings

    thread = start_thread_in_context("uploader", uploader.upload_until_stopped)
    failure: BaseException | None = None
    try:
        yield record_start_and_read_settings
    except BaseException as error:
        failure = error
        raise
    finally:
        uploader.stop.set()
        thread.join()
        uploader.upload_changed_checkpoints()
        if failure is None:
            defer(partial(record_result_and_delete_old_files, store))
        else:
            with suppress(Exception):
                store.record_attempt_end(failure)


def record_result_and_delete_old_files(store: CheckpointStore) -> None:
    """Write a note that the attempt has a result, and delete old files of all runs of the project.

    Waits up to 30 s for the deletion. Ignores errors.
    """
    with suppress(Exception):  # the result counts even if the blob store does not answer
        store.record_attempt_end(None)
    # In a thread, so that a request without an answer does not block this process.
    delete = partial(store.delete_abandoned_files, DELETION_SECONDS)
    start_thread_in_context("deletion", delete, daemon=True).join(DELETION_SECONDS)


def open_checkpoint_store(platform: Platform, run: str) -> CheckpointStore:
    """Return the CheckpointStore of this pod's attempt at the run, from the environment. Contacts no server."""
    project, domain, execution = read_execution_names()
    return CheckpointStore(
        posixpath.join(read_checkpoints_address(platform.output_address()), project, domain, run),
        execution=execution,
        attempt=int(os.environ.get("FLYTE_ATTEMPT_NUMBER") or 0),
        days=read_number_variable("FLYTE_DDP_CHECKPOINT_DAYS"),
        from_scratch=bool(os.environ.get(environment.FROM_SCRATCH_VARIABLE)),
    )


def read_checkpoints_address(output_address: str) -> str:
    """Return the address of the checkpoints of all runs.

    The address is FLYTE_DDP_CHECKPOINTS, or a folder beside the parent folder of ``output_address``.
    """
    beside = f"{posixpath.dirname(posixpath.dirname(output_address.rstrip('/')))}/flyte-ddp-checkpoints"
    return convert_to_storage_address(read_text_variable("FLYTE_DDP_CHECKPOINTS") or beside)


def start_thread_in_context(name: str, work: Callable[[], None], *, daemon: bool = False) -> threading.Thread:
    """Start and return a thread that calls ``work`` with this thread's context variables, as flytekit needs."""
    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), name=name, daemon=daemon)
    thread.start()
    return thread


class CheckpointUploader:
    """Uploads new checkpoints of an attempt from the folder of the run. Checkpoints that exist already are skipped."""

    def __init__(self, store: CheckpointStore, folder: Path) -> None:
        self.store, self.folder = store, folder
        self.uploaded = {name: get_file_version(folder / name) for name in SLOTS}  # downloaded checkpoints
        self.stop = threading.Event()
        self.failure_printed = False

    def upload_until_stopped(self) -> None:
        while not self.stop.wait(POLL_SECONDS):
            self.upload_changed_checkpoints()

    def upload_changed_checkpoints(self) -> None:
        """Upload all checkpoints that changed since the last upload, the older first.

        Prints the first failure. Raises nothing.
        """
        # In the order of writing, so that the later of two saves of the same step replaces the other or is newer.
        for name in sorted(SLOTS, key=lambda name: (get_file_version(self.folder / name) or (0, 0))[1]):
            version = get_file_version(self.folder / name)
            if version is None or self.uploaded.get(name) == version:
                continue
            try:
                self.store.upload_checkpoint(self.folder / name)
                self.uploaded[name] = version
            except FileNotFoundError:  # the run has ended and removed its checkpoints
                continue
            except Exception as error:
                if not self.failure_printed:
                    print(f"checkpoint {name} could not be uploaded: {error}; training continues", flush=True)
                self.failure_printed = True
