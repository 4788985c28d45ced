"""The log of promotions of a model. The last entry names the champion."""

import itertools
import json
import re
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, Self

from flyte_ddp import storage
from flyte_ddp.core.checks.parsing import parse_json
from flyte_ddp.core.checks.records import Count, JsonRecord
from flyte_ddp.core.errors import UserError
from flyte_ddp.release.model_files import ModelFiles, content_digest

PROMOTE, ROLLBACK = "promote", "rollback"
ENTRY = re.compile(r"[0-9]{8}\.json")
READERS = 16  # threads that read entries
DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Entry(JsonRecord):
    """An entry of the log, as it is stored."""

    number: Count  # from 1
    action: Annotated[str, {PROMOTE, ROLLBACK}]
    version: str  # the champion from now on: SHA-256 of its weights
    manifest: str  # SHA-256 of the version's manifest
    best: str  # the version with the best main measure so far, perhaps not the champion
    reason: str
    by: str  # a Flyte execution, or user@host
    time: str  # ISO 8601, UTC
    previous: str  # SHA-256 of the entry before; empty for the first
    nonce: str = ""  # differs between writers of the same entry
    digest: str = ""  # SHA-256 of this entry's file, which the file does not have

    @classmethod
    def from_file(cls, content: bytes) -> Self:
        """Parse the content of an entry's file. Raises ValueError if the content is malformed."""
        entry = cls.from_json_value(parse_json(content), "entry")
        if not all(map(DIGEST.fullmatch, (entry.version, entry.manifest))):
            raise ValueError("the version or the manifest is invalid")
        return replace(entry, digest=content_digest(content))


class LostError(UserError):
    """Another writer has appended the next entry of the log, ``winner``."""

    def __init__(self, winner: Entry) -> None:
        super().__init__(
            f"{winner.by} was faster: entry {winner.number} of the log made version {winner.version[:12]} the "
            f"champion ({winner.reason}); compare with this champion, and try again"
        )
        self.winner = winner


class PromotionLog(ModelFiles):
    """The log of one model. The methods retry failed requests as :class:`ModelFiles` describes."""

    def entry_address(self, number: int) -> str:
        return self.address_of("log", f"{number:08}.json")

    def read_champion(self) -> Entry | None:
        """Return the last entry of the log, which names the champion, or None if nothing was promoted.

        Older entries may be missing. Raises UserError if the digests in the entries show that an entry was altered.
        """
        numbers = self.list_entry_numbers()
        if not numbers:
            return None
        entry = self.read_entry(numbers[-1])
        before = entry.number - 1
        others = self.read_entries([before] if before in numbers else numbers[:-1])
        digests = {other.number: other.digest for other in others}
        if before in (0, *digests):
            follows = entry.previous == digests.get(before, "")
        else:  # the entry before is lost; a stray copy of an older entry would follow an existing entry
            follows = entry.previous not in ("", *digests.values())
        if not follows:
            raise self.altered_error(entry)
        return entry

    def read_log(self, at_least: int = 0) -> list[Entry]:
        """Return all entries of the log, oldest first.

        Raises:
            UserError: An entry was altered, or is missing. Entries up to the number ``at_least`` must exist.
        """
        numbers = self.list_entry_numbers()
        present = {*numbers}
        missing = next(number for number in itertools.count(1) if number not in present)
        if missing <= max([at_least, *numbers[-1:]]):
            rest = f"entries up to {numbers[-1]} exist" if numbers else "the log is empty"
            raise UserError(
                f"{self.entry_address(missing)} is missing; restore it, as no entry may be deleted ({rest})"
            )
        entries = [*self.read_entries(numbers)]
        for before, entry in itertools.pairwise([None, *entries]):
            if entry is not None and entry.previous != (before.digest if before else ""):
                raise self.altered_error(entry)
        return entries

    def read_entries(self, numbers: Sequence[int]) -> list[Entry]:
        with ThreadPoolExecutor(READERS) as pool:
            return [*pool.map(self.read_entry, numbers)]

    def altered_error(self, entry: Entry) -> UserError:
        rule = "does not follow the entry before it: one of the two was altered"
        return UserError(f"{self.entry_address(entry.number)} {rule}; restore them, or delete a stray copy")

    def list_entry_numbers(self) -> list[int]:
        names = self.list_files(self.address_of("log"))
        return [int(name.removesuffix(".json")) for name in names if ENTRY.fullmatch(name)]

    def read_entry(self, number: int) -> Entry:
        """Return the log's entry with this number. Raises UserError if the entry is missing or damaged."""
        address = self.entry_address(number)
        if (content := self.read_if_exists(address, storage.read_file)) is None:
            raise UserError(f"{address} is missing; restore it, as no entry may be deleted")
        with suppress(ValueError):
            entry = Entry.from_file(content)
            if entry.number == number:
                return entry
        raise UserError(f"{address} is damaged; restore it, as no entry of the log may be altered")

    def append_entry(self, before: Entry | None, *, by: str, reason: str, **values: str) -> Entry:
        """Append an entry to the log after the entry ``before``, and return the new entry.

        First writes a small file, to test that the storage never overwrites files.

        Args:
            before: The last entry of the log, or None for an empty log.
            by: The Flyte execution or user.
            reason: The reason of the entry, a text for people.
            values: The fields action, version, manifest and best.

        Raises:
            LostError: Another writer has written this entry.
            UserError: The reason is blank, or the storage overwrites files.
        """
        if not reason.strip():
            raise UserError("reason='': must not be empty; the registry's log keeps the reason")
        self.check_storage_never_overwrites()
        number = before.number + 1 if before else 1
        entry = Entry(
            number=number,
            reason=reason.strip(),
            by=by,
            time=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            previous=before.digest if before else "",
            nonce=secrets.token_hex(16),
            **values,
        )
        content = json.dumps(entry.to_json_value(), indent=1).encode() + b"\n"
        if not self.create_file(self.entry_address(number), content):
            raise LostError(self.read_entry(number))
        return Entry.from_file(content)


def replay_promotions(history: list[Entry]) -> tuple[list[Entry], dict[str, Entry]]:
    """Return the promotions and rollbacks that are in force after the whole log ``history``, oldest entry first.

    A rollback ends when the version that was rolled back becomes the champion again.

    Returns:
        The promotions that no rollback has undone, oldest first. The rollbacks in force, by the version that was rolled
        back.

    Raises:
        UserError: A rollback has no promotion to undo.
    """
    standing, taken_back = list[Entry](), dict[str, Entry]()
    for entry in history:
        if entry.action == PROMOTE:
            standing.append(entry)
        elif standing:
            taken_back[standing.pop().version] = entry
        else:
            raise UserError(
                f"entry {entry.number} of the log: rolls back, but no promotion is in force; restore the log"
            )
        taken_back.pop(entry.version, None)
    return standing, taken_back
