"""A copy of a run's intermediate results in a folder or object store, kept up to date while it trains."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flyte_ddp.errors import UserError
from flyte_ddp.results import EVENTS, FOLDER

LOOK_SECONDS = 1.0


@contextmanager
def copied(run_folder: Path, address: str) -> Iterator[None]:
    """Copies what there is under ``results/``, and what comes until the end of the block.

    Args:
        address: of a folder, in which one is made with the run folder's name: a path, or a URL that fsspec knows;
            empty: nothing is copied.

    Raises:
        UserError: nothing can be written there. Where that happens later, it is tried again and, at the end, said.
    """
    if not address:
        yield
        return
    try:
        copy = Copy(run_folder / FOLDER, f"{address.rstrip('/')}/{run_folder.name}")
        copy.begin()
    except Exception as error:  # fsspec's file systems have many of their own
        raise UserError(
            f"FLYTE_DDP_RESULTS={address!r}: cannot be written to ({error}); correct it, or give access to it"
        ) from None
    over = threading.Event()
    thread = threading.Thread(target=copy.follow, args=(over,), name="results", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        copy.finish()


class Copy:
    """Of a folder.

    Args:
        folder: what is copied.
        address: to where.
    """

    def __init__(self, folder: Path, address: str) -> None:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        self.folder, self.address = folder, address
        self.store, self.root = url_to_fs(address, **(s3_options() if address.startswith("s3://") else {}))
        self.done: dict[str, tuple[int, int]] = {}

    def begin(self) -> None:
        """Copies what there is, at least the file of events, be it empty: so a store that takes nothing shows."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / EVENTS).touch()
        self.copy_new()

    def follow(self, over: threading.Event) -> None:
        """Copies what comes; a failure now may be none at the next look."""
        while not over.wait(LOOK_SECONDS):
            with suppress(Exception):
                self.copy_new()

    def finish(self) -> None:
        """Copies what is left."""
        try:
            self.copy_new()
        except Exception as error:
            what = f"results are in {self.folder}, but not all in {self.address}"
            print(f"{what} ({type(error).__name__}: {error})", file=sys.stderr, flush=True)

    def copy_new(self) -> None:
        """Copies what has changed."""
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if not path.is_file() or path.name.startswith("."):
                continue
            found = path.stat()
            mark = (found.st_mtime_ns, found.st_size)
            if self.done.get(name) != mark:
                self.put(path, f"{self.root}/{name}")
                self.done[name] = mark

    def put(self, path: Path, target: str) -> None:
        """Copies a file; in a store of objects it appears whole, and so it does here in a folder."""
        store: Any = self.store
        if "file" not in store.protocol:
            store.put_file(str(path), target)
            return
        partial = Path(target).with_name(f".{Path(target).name}.tmp")
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(path.read_bytes())
        partial.replace(target)


def s3_options() -> dict[str, str]:
    """Flyte's own variables, which come first as in flytekit; s3fs itself knows the standard ``AWS_*`` ones."""
    names = {"endpoint_url": "ENDPOINT", "key": "ACCESS_KEY_ID", "secret": "SECRET_ACCESS_KEY"}
    found = {option: os.environ.get(f"FLYTE_AWS_{name}") for option, name in names.items()}
    return {option: value for option, value in found.items() if value}
