"""A copy of a run's intermediate results in a folder or object store, kept up to date while it trains."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flyte_ddp import storage
from flyte_ddp.credentials import masked
from flyte_ddp.errors import StoppedError, UserError
from flyte_ddp.results import EVENTS, FOLDER

LOOK_SECONDS = 1.0
LARGEST_SHARE = 0.1  # of the time for looking and copying: what grows is copied whole each time
LAST_SECONDS = 60.0  # for what is left at the end
STOPPED_SECONDS = 3.0  # the same in a pod that is told to stop, which has little time left


@contextmanager
def copied(run_folder: Path, address: str, *, goes_on: bool, name: str = "") -> Iterator[None]:
    """Copies what there is under ``results/``, and what comes until the end of the block.

    Args:
        address: of a folder, in which one is made with the run's name: a path, s3://, gs:// or az://; empty: nothing
            is copied.
        goes_on: the run continues, maybe on another host: it begins with the events that were copied there.
        name: of the run; empty: that of the folder.

    Raises:
        UserError: nothing can be written there. If that happens later, it is printed, and tried again.
    """
    if not address:
        yield
        return
    try:
        copy = Copy(run_folder / FOLDER, f"{address.rstrip('/')}/{name or run_folder.name}")
        copy.begin(goes_on=goes_on)
    except (UserError, storage.UnavailableError, OSError) as error:
        raise UserError(
            f"FLYTE_DDP_RESULTS={masked(address)!r}: cannot be written to ({error}); correct it, or give access to it"
        ) from None
    over = threading.Event()
    thread = threading.Thread(target=copy.follow, args=(over,), name="results", daemon=True)
    thread.start()
    last_seconds = LAST_SECONDS
    try:
        yield
    except StoppedError:
        last_seconds = STOPPED_SECONDS
        raise
    finally:
        over.set()
        thread.join(last_seconds)
        if thread.is_alive() or copy.failure:
            print(f"results are in {copy.folder}, but not all in {copy.address}", file=sys.stderr, flush=True)


class Copy:
    """Copies a folder to an address, which may not be the run's own folder."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address = folder, address
        place = storage.local_path(address)
        if place is not None and folder.resolve().is_relative_to(place.resolve()):
            raise UserError("that is where the run itself is")
        self.done: dict[str, tuple[int, int]] = {}
        self.failure = ""  # of the last look

    def begin(self, *, goes_on: bool) -> None:
        """Fetch the events of a run that goes on, and write them, which shows that the address can be written to.

        Where the address may only be written to, events of earlier attempts are replaced, which is printed if there
        may be some.
        """
        here, there = self.folder / EVENTS, storage.join(self.address, EVENTS)
        if goes_on and not here.exists():
            try:
                events = storage.retried(there, storage.read)
                self.folder.mkdir(parents=True, exist_ok=True)
                here.write_bytes(events)
            except storage.MissingError:
                pass
            except storage.ForbiddenError as error:
                print(f"results: what {there} had from earlier attempts is replaced ({error})", file=sys.stderr)
        content = here.read_bytes() if here.exists() else b""
        storage.retried(there, lambda _: storage.put(there, content))

    def follow(self, over: threading.Event) -> None:
        """Copies what comes until it is over, and then what is left; prints a failure when it is a new one."""
        while True:
            last = over.is_set()
            began = time.monotonic()
            before, self.failure = self.failure, self.copy_new()
            if self.failure and not before:
                print(f"results are not copied to {self.address}: {self.failure}", file=sys.stderr, flush=True)
            if last:
                return
            over.wait(max(LOOK_SECONDS, (time.monotonic() - began) / LARGEST_SHARE))

    def copy_new(self) -> str:
        """Copies what has changed; returns the first failure, empty if there was none."""
        failure = ""
        for path in sorted(self.folder.rglob("*")):
            if path.name.startswith(".") or not path.is_file():
                continue
            name, found = path.relative_to(self.folder).as_posix(), path.stat()
            mark = (found.st_mtime_ns, found.st_size)
            if self.done.get(name) == mark:
                continue
            try:
                storage.put(storage.join(self.address, name), path.read_bytes())
                self.done[name] = mark
            except Exception as error:  # the thread is to go on with the others
                failure = failure or f"{name} ({type(error).__name__}: {error})"
        return failure
