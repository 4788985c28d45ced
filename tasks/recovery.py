"""Retries: which failures Flyte is told to try again, and checkpoints that outlive a pod."""

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
from typing import Any, TypeVar

from flytekit import FlyteContextManager
from flytekit.core.base_task import PythonTask
from flytekit.exceptions.system import FlyteNonRecoverableSystemException
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException

from flyte_ddp.errors import RankError, StoppedError, UnreachableError, UserError
from flyte_ddp.pods.checkpoint_store import TRAINED, CheckpointStore
from flyte_ddp.process import postponed
from flyte_ddp.runs.checkpoint import FOLDER, SLOTS, Checkpoint
from flyte_ddp.runs.run_folder import METRICS, UNFINISHED
from flyte_ddp.runs.run_lock import release_reserved
from flyte_ddp.settings import Settings, from_environment
from flyte_ddp.storage import ForbiddenError
from tasks import eviction, places, pods

POLL_SECONDS = 0.5
SWEEP_SECONDS = 30.0  # of a pod that has its result
START = b'"kind": "start"'  # in metrics.jsonl: training begins, for the first time or again
AnyTask = TypeVar("AnyTask", bound=PythonTask)


@contextmanager
def guarded() -> Iterator[None]:
    """Goes around a task's body: checks the pod's code, and tells Flyte after which failures another try is worth it.

    Flyte counts any exception as final that does not say otherwise, and a pod that ends on SIGTERM without a word as
    well as one that never said why; ``retries`` and ``interruptible`` would mean nothing.
    """
    before = None
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, stop)
    try:
        pods.check_code()
        yield
    except BaseException as error:
        release_reserved()  # no training will follow
        if not isinstance(error, (RankError, StoppedError, UnreachableError, Sigterm)):
            raise
        failure = StoppedError("SIGTERM", step=None) if isinstance(error, Sigterm) else error
        if places.is_local() or (isinstance(failure, RankError) and not failure.recoverable):
            raise failure from failure.__cause__  # a rank's own traceback, for the pod's log
        evicted = eviction.eviction_reason() if isinstance(failure, StoppedError) else ""
        raise FlyteRecoverableException(f"{failure}{evicted}") from error
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def mistakes_in_inputs(task: AnyTask) -> AnyTask:
    """Goes above ``@task``: in a pod refused inputs are the user's mistake, as they are in a task's body.

    flytekit counts errors before the task's body as the system's.
    """
    dispatch_execute = task.dispatch_execute

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        try:
            return dispatch_execute(*args, **kwargs)
        except FlyteNonRecoverableSystemException as error:
            mistake = error.value  # which flytekit may have wrapped in one of its own
            while mistake is not None and not isinstance(mistake, UserError):
                mistake = mistake.__cause__ or mistake.__context__
            if mistake is None:
                raise
            raise FlyteUserRuntimeException(mistake) from mistake

    task.dispatch_execute = dispatch
    return task


class Sigterm(BaseException):
    """SIGTERM came before or after training, which handles it itself; no ``except Exception`` must stop this."""


def stop(*_: object) -> None:
    """Handles SIGTERM."""
    raise Sigterm


@contextmanager
def checkpoints_kept(run_folder: Path) -> Iterator[Callable[[], None]]:
    """In a pod: download the run's newest checkpoint, then upload those of this attempt, the last one at the end.

    After an attempt with a result, removes what no run of the project will continue, for SWEEP_SECONDS at most.

    Yields:
        What the attempt calls when it has its data and is about to launch its ranks; it may raise UnreachableError.

    Raises:
        UserError, UnreachableError: see :meth:`CheckpointStore.begin`.
    """
    if places.is_local():
        yield lambda: None
        return
    folder = run_folder / UNFINISHED / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    store = store_of_this_pod(run_folder.name)
    with postponed(signal.SIGTERM):
        found = store.begin(folder / SLOTS[0])
    sender = Sender(store, folder, from_environment(), found)

    def ranks_start() -> None:
        try:
            store.started(found.step if found else 0)
        except ForbiddenError as error:
            lost = "without checkpoints there, a lost pod loses all that it has done"
            print(f"{store.folder}: {error}; {lost}", flush=True)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(sender.run,), name="sender")
    thread.start()
    ended: BaseException | None = None
    try:
        yield ranks_start
    except BaseException as error:
        ended = error
        raise
    finally:
        sender.stop.set()
        thread.join()
        sender.send_new()
        with suppress(Exception):  # the result counts without it
            store.end(ended)
        if ended is None:
            sweep(store)


def store_of_this_pod(run: str) -> CheckpointStore:
    """Return the store of a run's checkpoints that the pod's environment names."""
    address = checkpoints_address(FlyteContextManager.current_context().file_access.raw_output_prefix)
    project, domain, execution = (
        os.environ[f"FLYTE_INTERNAL_EXECUTION_{name}"] for name in ("PROJECT", "DOMAIN", "ID")
    )
    return CheckpointStore(
        posixpath.join(address, project, domain, run),
        execution,
        attempt=int(os.environ.get("FLYTE_ATTEMPT_NUMBER") or 0),
        days=float(os.environ.get(pods.CHECKPOINT_DAYS_VARIABLE) or CheckpointStore.days),
        from_scratch=bool(os.environ.get(pods.FROM_SCRATCH_VARIABLE)),
        more_memory=more_memory(),
    )


def checkpoints_address(raw_output_prefix: str) -> str:
    """Return the address of all checkpoints: FLYTE_DDP_CHECKPOINTS, or a folder beside Flyte's outputs.

    Flyte gives an attempt PREFIX/XX/EXECUTION-NODE-ATTEMPT for its outputs; on Azure it begins with abfs:// for az://.
    """
    beside = f"{posixpath.dirname(posixpath.dirname(raw_output_prefix.rstrip('/')))}/flyte-ddp-checkpoints"
    return re.sub(r"^abfss?://([^/@]+)(@[^/]*)?", r"az://\1", os.environ.get(pods.CHECKPOINTS_VARIABLE) or beside)


def more_memory() -> str:
    """Return what helps against a lack of memory, with what the pod has."""
    name = pods.chosen_profile()
    given = f"profile {name!r} gives {pods.PROFILES[name].memory} of memory"
    return f"{given}: take one with more, fewer num_ranks, or a smaller batch_size"


def sweep(store: CheckpointStore) -> None:
    """Remove what no run will continue; returns after SWEEP_SECONDS, whether that is done or not."""
    stop = threading.Event()

    def remove() -> None:
        with suppress(Exception):  # the next pod will do it
            store.sweep(stop.is_set)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(remove,), name="sweep", daemon=True)
    thread.start()
    thread.join(SWEEP_SECONDS)
    stop.set()


class Sender:
    """Uploads new checkpoints, and notes where there should be one and is none."""

    def __init__(self, store: CheckpointStore, folder: Path, settings: Settings, found: Checkpoint | None) -> None:
        self.store, self.folder, self.settings = store, folder, settings
        self.sent = {name: self.mark(name) for name in SLOTS}  # what is there was downloaded
        self.starts_before = found.metrics.count(START) if found else 0
        self.training_since: float | None = None
        self.saved_or_noted = False
        self.stop = threading.Event()
        self.reported = False

    def run(self) -> None:
        """Upload until it is stopped."""
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
        """Uploads checkpoints that have changed; a failure is reported once, and tried again the next time."""
        for name in SLOTS:
            # Under a second name the file stays as it is while a newer one takes its place.
            link = self.folder / ".sending" / name
            try:
                link.parent.mkdir(exist_ok=True)
                link.unlink(missing_ok=True)
                os.link(self.folder / name, link)
                mark = self.mark(f".sending/{name}")
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

    def mark(self, name: str) -> tuple[int, int] | None:
        """Identifies a file among those of its name; None if there is none."""
        with suppress(FileNotFoundError):
            found = (self.folder / name).stat()
            return found.st_ino, found.st_mtime_ns
        return None
