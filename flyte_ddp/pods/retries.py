"""Which failures of a task are worth another attempt, and checkpoints that outlive the pod of an attempt."""

import contextvars
import os
import posixpath
import re
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
from flyte_ddp.pods.platforms import Platform, execution_names
from flyte_ddp.pods.profiles import PROFILE_VARIABLE, chosen_profile
from flyte_ddp.process import postponed
from flyte_ddp.runs.checkpoint import FOLDER, SLOTS, Checkpoint
from flyte_ddp.runs.run_folder import METRICS, UNFINISHED
from flyte_ddp.runs.run_lock import release_reserved
from flyte_ddp.settings import Settings, from_environment, read_number, read_text
from flyte_ddp.storage import ForbiddenError

POLL_SECONDS = 0.5
SWEEP_SECONDS = 30.0  # of a pod that has its result
START = b'"kind": "start"'  # in metrics.jsonl: training begins, for the first time or again


class Sigterm(BaseException):
    """SIGTERM came before or after training, which handles it itself; no ``except Exception`` must stop this."""


def raise_sigterm(*_: object) -> None:
    """Raise Sigterm: the handler of the signal."""
    raise Sigterm


@contextmanager
def translate_errors(platform: Platform) -> Iterator[None]:
    """Raise the platform's retryable error in a pod for a failure that may not happen again; go around a task's body.

    Such failures are an UnreachableError, SIGTERM, for which a handler is installed in the main thread, and a RankError
    that says so. First compares the pod's code with what was registered. After any failure, releases the reserved run.

    Raises:
        StoppedError: SIGTERM, in a local run.
        UserError: another copy of the library was registered.
    """
    before = None
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, raise_sigterm)
    try:
        environment.check_pod_code()
        yield
    except BaseException as error:
        release_reserved()  # no training will follow
        if not isinstance(error, (RankError, StoppedError, UnreachableError, Sigterm)):
            raise
        failure = StoppedError("SIGTERM", step=None) if isinstance(error, Sigterm) else error
        if platform.is_local() or (isinstance(failure, RankError) and not failure.recoverable):
            raise failure from failure.__cause__  # a rank's own traceback, for the pod's log
        evicted = eviction_reason(platform.disk_limit()) if isinstance(failure, StoppedError) else ""
        raise platform.retryable_error(f"{failure}{evicted}") from error
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def sync_checkpoints(platform: Platform, run_folder: Path) -> Iterator[Callable[[], None]]:
    """In a pod, download the run's newest checkpoint, then upload those of this attempt, the last one at the end.

    A thread looks for new ones every POLL_SECONDS. After an attempt with a result, removes from the store what no run
    of the project will continue, for SWEEP_SECONDS at most.

    Args:
        platform: What runs this task.
        run_folder: Folder of the run.

    Yields:
        What the attempt calls when it has its data and is about to launch its ranks; it may raise UnreachableError.

    Raises:
        UserError, UnreachableError: see :meth:`CheckpointStore.begin`.
    """
    if platform.is_local():
        yield lambda: None
        return
    folder = run_folder / UNFINISHED / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    store = open_store(platform, run_folder.name)
    with postponed(signal.SIGTERM):
        newest = store.begin(folder / SLOTS[0])
    sender = Sender(store, folder, from_environment(), newest)

    def note_start() -> None:
        try:
            store.started(newest.step if newest else 0)
        except ForbiddenError as error:
            lost = "without checkpoints there, a lost pod loses all that it has done"
            print(f"{store.folder}: {error}; {lost}", flush=True)

    thread = start_thread("sender", sender.run)
    failure: BaseException | None = None
    try:
        yield note_start
    except BaseException as error:
        failure = error
        raise
    finally:
        sender.stop.set()
        thread.join()
        sender.send_new()
        with suppress(Exception):  # the result counts without it
            store.end(failure)
        if failure is None:
            sweep_store(store)


def open_store(platform: Platform, run: str) -> CheckpointStore:
    """Return the store of a run's checkpoints that this pod's environment names."""
    return CheckpointStore(
        posixpath.join(checkpoints_address(platform.output_address()), *execution_names()[:2], run),
        execution=execution_names()[2],
        attempt=int(os.environ.get("FLYTE_ATTEMPT_NUMBER") or 0),
        days=read_number("FLYTE_DDP_CHECKPOINT_DAYS"),
        from_scratch=bool(os.environ.get(environment.FROM_SCRATCH_VARIABLE)),
        more_memory=more_memory(),
    )


def checkpoints_address(output_address: str) -> str:
    """Return the address of all checkpoints: FLYTE_DDP_CHECKPOINTS, or a folder beside Flyte's outputs.

    Flyte gives an attempt PREFIX/XX/EXECUTION-NODE-ATTEMPT for its outputs; on Azure it begins with abfs:// for az://.
    """
    beside = f"{posixpath.dirname(posixpath.dirname(output_address.rstrip('/')))}/flyte-ddp-checkpoints"
    return re.sub(r"^abfss?://([^/@]+)(@[^/]*)?", r"az://\1", read_text("FLYTE_DDP_CHECKPOINTS") or beside)


def more_memory() -> str:
    """Return what helps against a lack of memory, with what the pod has."""
    given = f"profile {read_text(PROFILE_VARIABLE)!r} gives {chosen_profile().memory} of memory"
    return f"{given}: take one with more, fewer num_ranks, or a smaller batch_size"


def sweep_store(store: CheckpointStore) -> None:
    """Remove what no run will continue; returns after SWEEP_SECONDS, whether that is done or not."""
    stop = threading.Event()

    def remove() -> None:
        with suppress(Exception):  # the next pod will do it
            store.sweep(stop.is_set)

    start_thread("sweep", remove, daemon=True).join(SWEEP_SECONDS)
    stop.set()


def start_thread(name: str, work: Callable[[], None], *, daemon: bool = False) -> threading.Thread:
    """Start a thread with a copy of this one's context variables, which platforms use, and return it."""
    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), name=name, daemon=daemon)
    thread.start()
    return thread


class Sender:
    """Uploads new checkpoints of an attempt, and notes in the store that there should be one and is none."""

    def __init__(self, store: CheckpointStore, folder: Path, settings: Settings, newest: Checkpoint | None) -> None:
        self.store, self.folder, self.settings = store, folder, settings
        self.sent = {name: self.file_mark(name) for name in SLOTS}  # what is there was downloaded
        self.starts_before = newest.metrics.count(START) if newest else 0
        self.training_since: float | None = None
        self.saved_or_noted = False
        self.stop = threading.Event()
        self.reported = False

    def run(self) -> None:
        """Upload every POLL_SECONDS until ``stop`` is set."""
        while not self.stop.wait(POLL_SECONDS):
            self.send_new()
            with suppress(Exception):  # the store does not answer, or the file is being replaced
                self.note_time_to_save()

    def note_time_to_save(self) -> None:
        """Record once that the attempt has trained for so long that there should be a checkpoint, unless one was sent.

        Its first step takes less than the ranks' time limit, and a checkpoint follows within the time between two.
        """
        seconds = self.settings.timeout + self.settings.checkpoint_seconds
        if self.saved_or_noted or not self.settings.checkpoint_seconds:
            return
        if self.training_since is None:
            metrics = (self.folder.parent / METRICS).read_bytes()
            if metrics.count(START) > self.starts_before:
                self.training_since = time.monotonic()
        elif time.monotonic() - self.training_since > seconds:
            self.store.note(TRAINED, 0, f"it trained for {seconds:g} s, and no checkpoint came here")
            self.saved_or_noted = True

    def send_new(self) -> None:
        """Upload checkpoints that have changed; print the first failure, and try again at the next call."""
        for name in SLOTS:
            # Under a second name the file stays as it is while a newer one takes its place.
            link = self.folder / ".sending" / name
            try:
                link.parent.mkdir(exist_ok=True)
                link.unlink(missing_ok=True)
                os.link(self.folder / name, link)
                mark = self.file_mark(f".sending/{name}")
                if self.sent.get(name) != mark:
                    self.store.send(link)
                    self.sent[name] = mark
                    self.saved_or_noted = True  # it did save
            except FileNotFoundError:  # none yet, or the run is over and has removed them
                continue
            except Exception as error:
                if not self.reported:
                    print(f"checkpoint {name} could not be sent: {error}; training continues", flush=True)
                self.reported = True
            finally:
                link.unlink(missing_ok=True)

    def file_mark(self, name: str) -> tuple[int, int] | None:
        """Return inode and time of a file in the folder, which differ from those of its predecessors; None without."""
        with suppress(FileNotFoundError):
            status = (self.folder / name).stat()
            return status.st_ino, status.st_mtime_ns
        return None
