"""Retries: which failures Flyte is told to try again, and checkpoints that outlive a pod."""

import contextvars
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from flytekit import current_context
from flytekit.core.base_task import PythonTask
from flytekit.core.checkpointer import Checkpoint
from flytekit.exceptions.system import FlyteNonRecoverableSystemException
from flytekit.exceptions.user import (
    FlyteDataNotFoundException,
    FlyteRecoverableException,
    FlyteUserRuntimeException,
)

from flyte_ddp.checkpoint import FOLDER, SLOTS
from flyte_ddp.errors import RankError, StoppedError, UnreachableError, UserError
from flyte_ddp.run_folder import UNFINISHED
from flyte_ddp.run_lock import release_reserved
from tasks import places

POLL_SECONDS = 0.5
AnyTask = TypeVar("AnyTask", bound=PythonTask)
PAUSES = (1.0, 4.0, 10.0)  # seconds between tries to fetch checkpoints; within the time that a pod has after SIGTERM


@contextmanager
def retried() -> Iterator[None]:
    """Goes around a task, or all of its body: tells Flyte after which failures the same run is worth another try.

    Flyte counts any exception as final that does not say otherwise, and a pod that ends on SIGTERM without a word as
    well as one that never said why; ``retries`` and ``interruptible`` would mean nothing.
    """
    before = None
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except BaseException as error:
        release_reserved()  # for training, which will not come
        if not isinstance(error, (RankError, StoppedError, UnreachableError, Sigterm)):
            raise
        failure = StoppedError("SIGTERM", step=None) if isinstance(error, Sigterm) else error
        if places.is_local() or (isinstance(failure, RankError) and not failure.recoverable):
            raise failure from failure.__cause__  # a rank's own traceback, for the pod's log
        raise FlyteRecoverableException(str(failure)) from error
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def mistakes_in_inputs(task: AnyTask) -> AnyTask:
    """Goes above ``@task``: in a pod inputs that are refused are the user's mistake, as they are where a task finds it.

    flytekit counts whatever goes wrong before the task's own code to the system.
    """
    dispatch_execute = task.dispatch_execute

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        try:
            return dispatch_execute(*args, **kwargs)
        except FlyteNonRecoverableSystemException as error:
            mistake = error.value  # in whose place flytekit may have put one of its own
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
    """In a pod: brings the checkpoints of the attempt before, and sends this one's to where the next will find them."""
    if places.is_local():
        yield
        return
    try:
        store = current_context().checkpoint
    except NotImplementedError:  # a platform without a place for checkpoints
        yield
        return
    folder = run_folder / UNFINISHED / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    sender = Sender(store, folder)
    with sigterm_postponed():
        if not any((folder / name).exists() for name in SLOTS):  # as there are where Elastic has started workers anew
            bring(store, folder)
        sender.send_new()  # at once: Flyte shows an attempt the checkpoints of the one before it, and no older ones
    thread = threading.Thread(target=contextvars.copy_context().run, args=(sender.run,), name="sender")
    thread.start()
    try:
        yield
    finally:
        sender.stop.set()
        thread.join()
        sender.send_new()


@contextmanager
def sigterm_postponed() -> Iterator[None]:
    """Keeps SIGTERM until the end of the block; outside the main thread, which handles it, nothing is to be done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if came:
            signal.raise_signal(signal.SIGTERM)


def bring(store: Checkpoint, folder: Path) -> None:
    """Downloads the checkpoints; there may be none, of an attempt that did not get so far.

    Where they cannot be had in several tries training begins anew: no later attempt would be shown them.
    """
    if not store.prev_exists():
        return
    for pause in (*PAUSES, None):
        try:
            store.restore(folder)
        except FlyteDataNotFoundException:
            print("the attempt before left no checkpoint", flush=True)
        except Exception as error:
            what = "training begins anew" if pause is None else f"next try in {pause:g} s"
            print(f"the checkpoints of the attempt before could not be fetched: {error}; {what}", flush=True)
            if pause is not None:
                time.sleep(pause)
                continue
        return


class Sender:
    """Sends checkpoints, each under its own name, when they have been replaced by newer ones."""

    def __init__(self, store: Checkpoint, folder: Path) -> None:
        self.store, self.folder = store, folder
        self.sent: dict[str, tuple[int, int]] = {}
        self.stop = threading.Event()
        self.told = False

    def run(self) -> None:
        """Sends until it is stopped."""
        while not self.stop.wait(POLL_SECONDS):
            self.send_new()

    def send_new(self) -> None:
        """Sends those that have changed; a failure is told, and tried again the next time."""
        for name in SLOTS:
            # Under a second name the file stays as it is while a newer one takes its place.
            link = self.folder / ".sending" / name
            try:
                link.parent.mkdir(exist_ok=True)
                link.unlink(missing_ok=True)
                os.link(self.folder / name, link)
                found = link.stat()
                mark = (found.st_ino, found.st_mtime_ns)
                if self.sent.get(name) != mark:
                    self.store.save(link)
                    self.sent[name] = mark
            except FileNotFoundError:
                continue
            except Exception as error:
                if not self.told:
                    print(f"checkpoint {name} could not be sent: {error}; training goes on", flush=True)
                self.told = True
            finally:
                link.unlink(missing_ok=True)
