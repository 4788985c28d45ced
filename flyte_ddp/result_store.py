"""A copy of a run's intermediate results in a folder or object store, kept up to date while it trains."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flyte_ddp.errors import StoppedError, UserError
from flyte_ddp.results import EVENTS, FOLDER

LOOK_SECONDS = 1.0
LARGEST_SHARE = 0.1  # of the time for looking and copying: what grows is copied whole each time
LAST_SECONDS = 60.0  # for what is left at the end
STOPPED_SECONDS = 3.0  # the same in a pod that is told to stop, which has little time left
PROBE = ".writable"


@contextmanager
def copied(run_folder: Path, address: str, *, goes_on: bool, name: str = "") -> Iterator[None]:
    """Copies what there is under ``results/``, and what comes until the end of the block.

    Args:
        address: of a folder, in which one is made with the run's name: a path, or a URL that fsspec knows; empty:
            nothing is copied.
        goes_on: the run does, maybe on another host: it begins with the events that were copied there.
        name: of the run; empty: that of the folder.

    Raises:
        UserError: nothing can be written there. Where that happens later, it is said, and tried again.
    """
    if not address:
        yield
        return
    try:
        copy = Copy(run_folder / FOLDER, f"{address.rstrip('/')}/{name or run_folder.name}")
        copy.begin(goes_on=goes_on)
    except Exception as error:  # fsspec's file systems have many of their own
        raise UserError(
            f"FLYTE_DDP_RESULTS={address!r}: cannot be written to ({error}); correct it, or give access to it"
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
    """Of a folder.

    Args:
        folder: what is copied.
        address: to where.

    Raises:
        ValueError: an address of no known kind, or of the run's own folder.
    """

    def __init__(self, folder: Path, address: str) -> None:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        self.folder, self.address = folder, address
        self.store, self.root = url_to_fs(address, **(s3_options() if address.startswith("s3://") else {}))
        self.is_local = "file" in self.store.protocol
        if self.is_local and folder.resolve().is_relative_to(Path(self.root).resolve()):
            raise ValueError("that is where the run itself is")
        self.done: dict[str, tuple[int, int]] = {}
        self.failure = ""  # of the last look

    def begin(self, *, goes_on: bool) -> None:
        """Sees whether the place can be written to, and has the events of a run that goes on come from there."""
        if self.is_local:
            Path(self.root).mkdir(parents=True, exist_ok=True)
        self.store.pipe_file(f"{self.root}/{PROBE}", b"")
        self.store.rm_file(f"{self.root}/{PROBE}")
        here, there = self.folder / EVENTS, f"{self.root}/{EVENTS}"
        if goes_on and not here.exists() and self.store.exists(there):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.store.get_file(there, str(here))

    def follow(self, over: threading.Event) -> None:
        """Copies what comes until it is over, and then what is left; a failure is said when it is a new one."""
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
        """Copies what has changed; the first of what could not be copied, in words."""
        failure = ""
        for path in sorted(self.folder.rglob("*")):
            if path.name.startswith(".") or not path.is_file():
                continue
            name, found = path.relative_to(self.folder).as_posix(), path.stat()
            mark = (found.st_mtime_ns, found.st_size)
            if self.done.get(name) == mark:
                continue
            try:
                self.put(path, f"{self.root}/{name}")
            except Exception as error:
                failure = failure or f"{name} ({type(error).__name__}: {error})"
            else:
                self.done[name] = mark
        return failure

    def put(self, path: Path, target: str) -> None:
        """Copies a file; in a store of objects it appears whole, and so it does here in a folder."""
        store: Any = self.store
        if not self.is_local:
            store.put_file(str(path), target)
            return
        partial = Path(target).with_name(f".{Path(target).name}.tmp")
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(path.read_bytes())
        partial.replace(target)


def s3_options() -> dict[str, str]:
    """Flyte's own variables, which come first as in flytekit; s3fs itself knows the standard ``AWS_*`` ones."""
    from flyte_ddp.storage.s3 import flytes_own

    endpoint, key, secret = flytes_own(os.environ)
    return ({"endpoint_url": endpoint} if endpoint else {}) | ({"key": key, "secret": secret} if key and secret else {})
