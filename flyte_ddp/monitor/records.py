"""The windows of a champion in the registry, by the champion's entry in the log. Each file is written once.

ADDRESS/NAME/monitor/00000003/00000007.json                     the seventh window.
ADDRESS/NAME/monitor/00000003/samples/00000007-DIGEST-DIGEST    digests of address and samples, and of the author.
ADDRESS/NAME/monitor/00000003/truth/00000007-0001.json          the same window with a truth that came later.
"""

import hashlib
import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace

from flyte_ddp import storage
from flyte_ddp.core.errors import UserError
from flyte_ddp.monitor.window import LOOKED_AT, Score, Window, is_alarm
from flyte_ddp.release.promotion_log import READERS, Entry
from flyte_ddp.release.registry import DAMAGED, Registry

RECENT = 50  # windows of a page
RECORD = re.compile(r"(?:truth/)?([0-9]{8})(?:-[0-9]+)?\.json")
MARK = re.compile(r"samples/([0-9]{8})-([0-9a-f]+)-([0-9a-f]+)")


@dataclass(frozen=True)
class Records:
    """The files of a champion's windows."""

    registry: Registry
    folder: str
    files: dict[int, list[str]]  # by the window's number, ascending: the record, then records with a later truth
    marks: set[tuple[int, str, str]]  # numbers with the digests of digest_samples and digest_author

    def read_windows(self, numbers: Collection[int]) -> list[Window]:
        """Read the windows with these numbers, each with the last truth, in the order of the numbers.

        Raises UserError if a file is damaged.
        """
        with ThreadPoolExecutor(READERS) as pool:
            return [*pool.map(self.read_window, numbers)]

    def read_window(self, number: int) -> Window:
        """Return window ``number`` from its newest file, which has the last truth.

        ``number`` must be in ``files``. Raises UserError if the file is damaged.
        """
        address = storage.join_address(self.folder, self.files[number][-1])
        try:
            return Window.from_json(self.registry.read_if_exists(address, storage.read_file) or b"")
        except DAMAGED:
            raise UserError(f"{address}: is damaged; restore or delete it") from None

    def read_deciding_windows(self, window: Window) -> list[Window]:
        """Read the earlier windows that decide whether ``window`` is an alarm, and return them, oldest first.

        May return more windows than needed. Returns [] if the window has no moved columns and no worse score. Raises
        UserError if a file is damaged.
        """
        found, numbers = list[Window](), [number for number in self.files if number < window.number]
        while numbers and not (
            (not window.moved or sum(bool(each.columns) for each in found) >= LOOKED_AT - 1)
            and (not window.worse or sum(each.worse_p is not None for each in found) >= LOOKED_AT - 1)
        ):
            some = max(LOOKED_AT - 1, len(found))  # mostly few; twice as many each time if few windows count
            found = self.read_windows(numbers[-some:]) + found
            del numbers[-some:]
        return found

    def write_mark(self, number: int, window: Window) -> None:
        """Write a window's mark, a file whose name has the window's number, and digests of samples and author.

        The mark makes equal windows findable without reading all windows. Adds the mark to ``marks``.
        """
        mark = (digest_samples(window), digest_author(window))
        self.registry.create_file(storage.join_address(self.folder, f"samples/{number:08}-{'-'.join(mark)}"), b"\n")
        self.marks.add((number, *mark))

    def find_same_window(self, window: Window, *, idempotent: bool) -> Window | None:
        """Return the first window with the address and the samples of ``window``, or None.

        With ``idempotent``, if no window has the same samples, returns the first window with the same address and the
        same author. Writes missing marks. Raises UserError if a file is damaged.
        """
        # A mark is missing if the writer was killed, or if an older release wrote the record.
        missing = sorted(self.files.keys() - {number for number, *_ in self.marks})
        for number, each in zip(missing, self.read_windows(missing), strict=True):
            self.write_mark(number, each)
        for place, digest in enumerate((digest_samples, digest_author)[: 1 + idempotent], 1):
            marked = {mark[0] for mark in self.marks if mark[place] == digest(window)}
            # If a person deleted a record, another window may have the same number now.
            same = self.read_windows([number for number in self.files if number in marked])
            if found := next((each for each in same if digest(each) == digest(window)), None):
                return found
        return None


def read_records(registry: Registry, entry: Entry) -> Records:
    """List the files of a champion's windows, and return the Records with their names.

    ``entry`` is the champion's log entry.
    """
    folder = registry.address_of("monitor", f"{entry.number:08}")
    files, marks = dict[int, list[str]](), set[tuple[int, str, str]]()
    for name in registry.list_files(folder):  # sorted: the records first, and truths in order
        if found := RECORD.fullmatch(name):
            files.setdefault(int(found[1]), []).append(name)
        elif found := MARK.fullmatch(name):
            marks.add((int(found[1]), found[2], found[3]))
    return Records(registry, folder, files, marks)


def digest_samples(window: Window) -> str:
    return digest_text(f"{window.address}\n{window.digest}")


def digest_author(window: Window) -> str:
    return digest_text(f"{window.address}\n{window.by}")


def digest_text(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def read_windows(registry: Registry, entry: Entry) -> list[Window]:
    """Read the last RECENT (50) windows of a champion, and return the windows, oldest first.

    ``entry`` is the champion's entry in the log. Raises UserError if a file is damaged.
    """
    records = read_records(registry, entry)
    return records.read_windows([*records.files][-RECENT:])


def record_window(registry: Registry, entry: Entry, window: Window, *, idempotent: bool = False) -> Window:
    """Write a window into the registry, and return the window with number and alarm.

    If an earlier window has the same address and samples, returns the earlier window. If ``window`` has new truths, the
    earlier window is first recorded with these truths. Reads the windows that decide about an alarm.

    Args:
        registry: The registry of the model.
        entry: The champion's entry in the log.
        window: The window, without a number.
        idempotent: Whether an earlier window with the same address and author counts as this window, even if the
            samples differ.

    Raises:
        UserError: A file is damaged, or the registry cannot be read or written.
    """
    while True:
        records = read_records(registry, entry)
        same = records.find_same_window(window, idempotent=idempotent)
        if same is None:
            number = max(records.files, default=0) + 1
            found, file = replace(window, number=number), f"{number:08}.json"
        else:
            found = replace(same, **{field.name: getattr(window, field.name) for field in fields(Score)})
            if not window.truths or found == same:
                return same
            file = f"truth/{same.number:08}-{len(records.files[same.number]):04}.json"
        found = replace(found, alarm=is_alarm([*records.read_deciding_windows(found), found]))
        if registry.create_file(storage.join_address(records.folder, file), found.to_json(indent=1).encode() + b"\n"):
            if same is None:
                records.write_mark(found.number, found)
            return found
