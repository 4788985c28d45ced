"""Retries: which failures Flyte is told to try again, and checkpoints that outlive a pod."""

import contextvars
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from flytekit.core.base_task import PythonTask
from flytekit.exceptions.system import FlyteNonRecoverableSystemException
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException

from flyte_ddp.errors import RankError, StoppedError, UnreachableError, UserError
from flyte_ddp.process import postponed
from flyte_ddp.runs.checkpoint import FOLDER, SLOTS
from flyte_ddp.runs.run_folder import UNFINISHED
from flyte_ddp.runs.run_lock import release_reserved
from tasks import eviction, places, pods
from tasks.checkpoint_store import CheckpointStore

POLL_SECONDS = 0.5
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
def checkpoints_kept(run_folder: Path) -> Iterator[None]:
    """In a pod: downloads the run's newest checkpoint, and uploads those of this attempt."""
    if places.is_local():
        yield
        return
    folder = run_folder / UNFINISHED / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    store = CheckpointStore.of_this_pod(run_folder.name)
    try:
        with postponed(signal.SIGTERM):
            store.begin(folder / SLOTS[0])
    except PermissionError as error:
        print(f"{store.folder}: {error}; without checkpoints there, a lost pod loses all that it has done", flush=True)
        yield
        return
    sender = Sender(store, folder)
    thread = threading.Thread(target=contextvars.copy_context().run, args=(sender.run,), name="sender")
    thread.start()
    ended: BaseException | None = None
    try:
        yield
    except BaseException as error:
        ended = error
        raise
    finally:
        sender.stop.set()
        thread.join()
        sender.send_new()
        with suppress(Exception):  # the result counts without it
            store.end(ended)


class Sender:
    """Uploads new checkpoints."""

    def __init__(self, store: CheckpointStore, folder: Path) -> None:
        self.store, self.folder = store, folder
        self.sent = {name: self.mark(name) for name in SLOTS}  # what is there was downloaded
        self.stop = threading.Event()
        self.reported = False

    def run(self) -> None:
        """Uploads until it is stopped; first removes old files, for which training does not wait."""
        with suppress(Exception):  # the next pod will do it
            self.store.sweep(self.stop.is_set)
        while not self.stop.wait(POLL_SECONDS):
            self.send_new()

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
