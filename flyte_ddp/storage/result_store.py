"""A copy of a run's intermediate results in a folder or an object store, updated during the run."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flyte_ddp import storage
from flyte_ddp.core.errors import StoppedError, UserError, print_to_stderr
from flyte_ddp.core.files import get_file_version, list_files
from flyte_ddp.core.results import EVENTS, FOLDER
from flyte_ddp.core.text.credentials import mask_credentials

LOOK_SECONDS = 1.0
LARGEST_SHARE = 0.1  # of the time is spent on copying, because a growing file is copied whole each time
LAST_SECONDS = 60.0  # wait for the last files at the end of a run
STOPPED_SECONDS = 3.0  # wait for the last files in a pod that must stop and has little time left


@contextmanager
def mirror_results(run_folder: Path, address: str, name: str, *, resuming: bool) -> Iterator[None]:
    """During the block, copy changed files below ``results/`` of the run folder to ``ADDRESS/NAME``.

    First writes ``events.jsonl`` to the address, also if it is empty, and retries an outage up to 3 times. Then a
    thread copies the files, and prints failures to stderr. The end of the block waits up to 60 s for the last files, or
    up to 3 s after a StoppedError.

    Args:
        run_folder: The folder of the run.
        address: A path, s3://, gs:// or az:// (empty: nothing is copied).
        name: The name of the folder at the address.
        resuming: If True and the run folder has no events, first fetches the events of earlier attempts.

    Raises:
        UserError: The address contains the run folder, or cannot be written to.
    """
    if not address:
        yield
        return
    try:
        mirror = Mirror(run_folder / FOLDER, f"{address.rstrip('/')}/{name}", resuming=resuming)
    except (UserError, storage.UnavailableError, OSError) as error:
        raise UserError(
            f"FLYTE_DDP_RESULTS={mask_credentials(address)!r}: cannot be written to ({error}); correct the "
            "address, or allow writing"
        ) from None
    ended = threading.Event()
    thread = threading.Thread(target=mirror.copy_until_ended, args=(ended,), name="results", daemon=True)
    thread.start()
    last_seconds = LAST_SECONDS
    try:
        yield
    except StoppedError:
        last_seconds = STOPPED_SECONDS
        raise
    finally:
        ended.set()
        thread.join(last_seconds)
        if thread.is_alive() or mirror.failure:
            print_to_stderr(f"not all results were copied to {mirror.address}; all are in {mirror.folder}")


class Mirror:
    """Copies a folder to an address, the events first.

    If a resumed run has no events, first fetches its earlier events from the address.
    """

    def __init__(self, folder: Path, address: str, *, resuming: bool) -> None:
        """Copy the events to the address. If no events exist, copies an empty file.

        If ``resuming`` is True and ``folder`` has no events, first downloads the events of earlier attempts. If this
        download is forbidden, prints that the earlier events are replaced. Makes up to 4 tries of each request, with
        pauses.

        Raises:
            UserError: The address contains ``folder``.
            UnavailableError: The address cannot be reached.
            OSError: The events cannot be written to ``folder``.
        """
        self.folder, self.address = folder, address
        self.versions: dict[str, object] = {}  # of the last copies, by file name
        self.failure = ""  # of the last round of copies
        place = storage.find_local_path(address)
        if place is not None and folder.resolve().is_relative_to(place.resolve()):
            raise UserError("the address contains the run folder")
        here, there = folder / EVENTS, storage.join_address(address, EVENTS)
        if resuming and not here.exists():
            try:
                events = storage.call_with_retries(there, storage.read_file)
                folder.mkdir(parents=True, exist_ok=True)
                here.write_bytes(events)
            except storage.MissingError:
                pass
            except storage.ForbiddenError as error:
                print_to_stderr(f"results: {there} of earlier attempts cannot be read ({error}) and is replaced")
        content = here.read_bytes() if here.exists() else b""
        storage.call_with_retries(there, lambda _: storage.write_file(there, content))

    def copy_until_ended(self, ended: threading.Event) -> None:
        """Copy changed files, again and again, until ``ended`` is set, and once more afterwards.

        After each round, ``failure`` is the round's first failure, or "". If the round before had no failure, prints
        the failure to stderr.
        """
        last = False
        while not last:
            last, began = ended.is_set(), time.monotonic()
            before, self.failure = self.failure, self.copy_changed_files()
            if self.failure and not before:
                print_to_stderr(f"results are not copied to {self.address}: {self.failure}")
            if not last:
                ended.wait(max(LOOK_SECONDS, (time.monotonic() - began) / LARGEST_SHARE))

    def copy_changed_files(self) -> str:
        """Copy the files that have changed since their last copy. Hidden files are skipped.

        Returns:
            The first failure as text, or "" if no copy failed.
        """
        failure = ""
        for path in list_files(self.folder):
            if path.name.startswith("."):
                continue
            name = path.relative_to(self.folder).as_posix()
            try:
                if self.versions.get(name) != (version := get_file_version(path)):
                    storage.write_file(storage.join_address(self.address, name), path.read_bytes())
                    self.versions[name] = version
            except Exception as error:  # the other files are still copied
                failure = failure or f"{name} ({type(error).__name__}: {error})"
        return failure
