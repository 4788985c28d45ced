"""A copy of a run's intermediate results in a folder or object store, kept up to date while it trains."""

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
def mirror_results(run_folder: Path, address: str, *, resuming: bool, name: str = "") -> Iterator[None]:
    """Copy the files below ``results/`` in a thread, as they change, until the end of the block.

    Args:
        run_folder: has ``results/``, or will have.
        address: a folder in which one is made with the run's name: a path, s3://, gs:// or az://; empty: nothing is
            copied.
        resuming: the run continues, maybe on another host: it begins with the events that were copied to the address.
        name: the run's; empty: that of the folder.

    Raises:
        UserError: nothing can be written to the address. If that happens later, it is printed, and tried again.
    """
    if not address:
        yield
        return
    try:
        mirror = Mirror(run_folder / FOLDER, f"{address.rstrip('/')}/{name or run_folder.name}", resuming=resuming)
    except (UserError, storage.UnavailableError, OSError) as error:
        raise UserError(
            f"FLYTE_DDP_RESULTS={masked(address)!r}: cannot be written to ({error}); correct it, or give access to it"
        ) from None
    over = threading.Event()
    thread = threading.Thread(target=mirror.follow, args=(over,), name="results", daemon=True)
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
        if thread.is_alive() or mirror.failure:
            print(f"results are in {mirror.folder}, but not all in {mirror.address}", file=sys.stderr, flush=True)


class Mirror:
    """Copies a folder to an address, which may not be the run's own folder.

    Fetches the events of a run that resumes, and writes them, which shows that the address can be written to. Where it
    may only be written to, events of earlier attempts are replaced, which is printed.
    """

    def __init__(self, folder: Path, address: str, *, resuming: bool) -> None:
        self.folder, self.address = folder, address
        self.done: dict[str, tuple[int, int]] = {}
        self.failure = ""  # of the last look
        place = storage.local_path(address)
        if place is not None and folder.resolve().is_relative_to(place.resolve()):
            raise UserError("that is where the run itself is")
        here, there = folder / EVENTS, storage.join(address, EVENTS)
        if resuming and not here.exists():
            try:
                events = storage.retried(there, storage.read)
                folder.mkdir(parents=True, exist_ok=True)
                here.write_bytes(events)
            except storage.MissingError:
                pass
            except storage.ForbiddenError as error:
                print(f"results: what {there} had from earlier attempts is replaced ({error})", file=sys.stderr)
        content = here.read_bytes() if here.exists() else b""
        storage.retried(there, lambda _: storage.put(there, content))

    def follow(self, over: threading.Event) -> None:
        """Copy what changes until ``over`` is set, and then what is left; print a failure when it is a new one."""
        last = False
        while not last:
            last, began = over.is_set(), time.monotonic()
            before, self.failure = self.failure, self.copy_changes()
            if self.failure and not before:
                print(f"results are not copied to {self.address}: {self.failure}", file=sys.stderr, flush=True)
            if not last:
                over.wait(max(LOOK_SECONDS, (time.monotonic() - began) / LARGEST_SHARE))

    def copy_changes(self) -> str:
        """Copy what has changed; return the first failure, empty if there was none."""
        failure = ""
        for path in sorted(self.folder.rglob("*")):
            if path.name.startswith(".") or not path.is_file():
                continue
            name, found = path.relative_to(self.folder).as_posix(), path.stat()
            if self.done.get(name) != (mark := (found.st_mtime_ns, found.st_size)):
                try:
                    storage.put(storage.join(self.address, name), path.read_bytes())
                    self.done[name] = mark
                except Exception as error:  # the thread is to go on with the others
                    failure = failure or f"{name} ({type(error).__name__}: {error})"
        return failure
