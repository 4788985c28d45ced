"""The windows of a champion in the registry, by its entry in the log. Each file is written once.

ADDRESS/NAME/monitor/00000003/00000007.json               the seventh window
ADDRESS/NAME/monitor/00000003/samples/00000007-DIGEST     its address and samples, as a digest
ADDRESS/NAME/monitor/00000003/truth/00000007-0001.json    the same window with a truth that came later
"""

import hashlib
import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.monitor.window import TRUTH_FIELDS, Window, is_alarm
from flyte_ddp.release.registry import DAMAGED, READERS, Entry, Registry

RECENT = 50  # windows that are read
FILE = re.compile(r"(?:(samples|truth)/)?([0-9]{8})(?:-([0-9a-f]+))?(?:\.json)?")


@dataclass(frozen=True)
class Records:
    """The files of a champion's windows."""

    registry: Registry
    folder: str
    files: dict[int, list[str]]  # by the window's number, ascending: the record, then those with a later truth
    digests: set[tuple[int, str]]  # numbers, and the digests of address and samples

    def read(self, numbers: Collection[int]) -> list[Window]:
        """Return windows by their numbers, each with its last truth. Raises UserError for a damaged file."""
        with ThreadPoolExecutor(READERS) as pool:
            return [*pool.map(self.read_window, numbers)]

    def read_window(self, number: int) -> Window:
        address = storage.join(self.folder, self.files[number][-1])
        try:
            return Window.from_json(self.registry.read_file(address, storage.read_file) or b"")
        except DAMAGED:
            raise UserError(f"{address}: is damaged; restore or delete it") from None

    def read_recent(self, last: int) -> list[Window]:
        """Return up to 50 windows, oldest first, of which none has a larger number than ``last``."""
        return self.read([number for number in self.files if number <= last][-RECENT:])

    def write_digest(self, number: int, window: Window) -> None:
        digest = digest_samples(window)
        self.registry.create_file(storage.join(self.folder, f"samples/{number:08}-{digest}"), b"\n")
        self.digests.add((number, digest))

    def find_same(self, window: Window) -> Window | None:
        """Return the first window with the same address and samples, or None. Writes missing digests."""
        # A digest is missing if its writer was killed, or if the record is older than digests are.
        missing = sorted(self.files.keys() - {number for number, _ in self.digests})
        for number, each in zip(missing, self.read(missing), strict=True):
            self.write_digest(number, each)
        digest = digest_samples(window)
        # A person may have deleted a record, so that another window has its number now.
        same = self.read([number for number in self.files if (number, digest) in self.digests])
        return next((each for each in same if digest_samples(each) == digest), None)


def list_records(registry: Registry, entry: Entry) -> Records:
    folder = registry.at("monitor", f"{entry.number:08}")
    files, digests = dict[int, list[str]](), set[tuple[int, str]]()
    for name in registry.list_files(folder):  # sorted: the records first, and truths in their order
        if found := FILE.fullmatch(name):
            number = int(found[2])
            if found[1] == "samples":
                digests.add((number, found[3]))
            else:
                files.setdefault(number, []).append(name)
    return Records(registry, folder, files, digests)


def digest_samples(window: Window) -> str:
    return hashlib.sha256(f"{window.address}\n{window.digest}".encode(errors="surrogateescape")).hexdigest()


def read_windows(registry: Registry, entry: Entry) -> list[Window]:
    """Return the last 50 windows of a champion, oldest first. Raises UserError for a damaged record."""
    records = list_records(registry, entry)
    return records.read_recent(max(records.files, default=0))


def record_window(registry: Registry, entry: Entry, window: Window, *, once: bool = False) -> Window:
    """Write a window into the registry, and return the window with its number and whether it is an alarm.

    If an earlier window has the same address and samples, returns the earlier window, to which a new truth is added.
    With ``once`` the same address and author are enough, among the last 50 windows.
    """
    while True:
        records = list_records(registry, entry)
        last = max(records.files, default=0)
        same, before = records.find_same(window), records.read_recent(last)
        if same is None and once:
            same = next((each for each in before if (each.by, each.address) == (window.by, window.address)), None)
        if same is None:
            found, file = replace(window, number=last + 1), f"{last + 1:08}.json"
        else:
            found = replace(same, **{name: getattr(window, name) for name in TRUTH_FIELDS})
            if not window.truths or found == same:
                return same
            before = records.read_recent(same.number - 1)
            file = f"truth/{same.number:08}-{len(records.files[same.number]):04}.json"
        found = replace(found, alarm=is_alarm([*before, found]))
        if registry.create_file(storage.join(records.folder, file), found.to_json(indent=1).encode() + b"\n"):
            if same is None:
                records.write_digest(found.number, found)
            return found
