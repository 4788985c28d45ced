"""A model's registry in a folder or in object storage: a log whose last entry names the champion.

    ADDRESS/NAME/log/00000001.json          an entry: who became champion, why, and the digest of the entry before
    ADDRESS/NAME/champion.json              a copy of the last entry, perhaps late: from there readers go on in the log
    ADDRESS/NAME/versions/DIGEST/           a model, by the SHA-256 of its weights; see versions.py
    ADDRESS/NAME/judgements/TEST_DIGEST/    what has been judged on a test split; see looks.py

Every file but the copy is written once and never again. So there is nothing to lock, and nothing half done to repair:
of two who want to write the next entry one succeeds, and the other is told so.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import re
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple, Self

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.storage import ExistsError, MissingError, UnavailableError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
PROMOTE, ROLLBACK = "promote", "rollback"
ENTRY = re.compile(r"[0-9]{8}\.json")
READERS = 16  # threads that read entries
CHAMPION = "champion.json"
PROBE = ".creates-once"  # no model's name; a file that is written to find out whether the store can do that


class LogError(UserError):
    """An entry of the log is missing, damaged or altered."""


class LostError(UserError):
    """Somebody else has written the next entry of the log; ``winner`` is that entry."""

    def __init__(self, winner: Entry) -> None:
        super().__init__(
            f"{winner.by} was faster: by entry {winner.number} of the log version {winner.version[:12]} is the "
            f"champion ({winner.reason}); compare with that one, and try again"
        )
        self.winner = winner


@dataclass(frozen=True)
class Entry:
    """An entry of the log, as it is stored."""

    number: int  # from 1
    action: str  # promote or rollback
    version: str  # the champion from now on: SHA-256 of its weights
    manifest: str  # SHA-256 of the version's manifest
    best: str  # the version with the best test accuracy so far, which is not forgotten when others take its place
    reason: str
    by: str  # a Flyte execution, or user@host
    time: str  # ISO 8601, UTC
    previous: str  # SHA-256 of the entry before; empty for the first
    digest: str  # SHA-256 of this entry's file

    @classmethod
    def from_file(cls, content: bytes) -> Self:
        """Parse the content of an entry's file, and return the entry; ValueError, TypeError or KeyError if damaged."""
        values = {**json.loads(content), "digest": hashlib.sha256(content).hexdigest()}
        found = {field.name: values[field.name] for field in dataclasses.fields(cls)}
        if any(type(found[field.name]).__name__ != field.type for field in dataclasses.fields(cls)):
            raise ValueError("a value of another type")
        return cls(**found)


def check_model_name(name: str) -> None:
    """Raise a UserError for a name that cannot be the folder of a model."""
    if not NAME.fullmatch(name):
        raise UserError(
            f"model name {name!r}: must be letters, digits, '_', '-' and '.' only, and begin with a letter or digit"
        )


class Registry:
    """The registry of one model. Every method raises a UserError if the store cannot be read or written.

    Args:
        address: of all registries: a path, or an address of S3, Google Cloud Storage or Azure Blob Storage.
        name: of the model; a UserError if it cannot be a folder's name.

    """

    def __init__(self, address: str, name: str) -> None:
        check_model_name(name)
        if not address or storage.scheme(address) in ("http", "https"):
            raise UserError(f"registry {address!r}: must be a path, or an address of s3://, gs:// or az://; give one")
        self.address, self.name = address, name

    def at(self, *parts: str) -> str:
        """Return the address of a file or folder in the registry; ``parts`` are the names of its path."""
        return storage.join(self.address, "/".join((self.name, *parts)))

    def entry_address(self, number: int) -> str:
        """Return the address of the log's entry with that number."""
        return self.at("log", entry_file_name(number))

    def refuse_overwriting_storage(self) -> None:
        """Raise a UserError if the store replaces an existing file when asked to create it.

        In such a store two promotions at the same time could both succeed. Writes a probe file of random content to the
        registry's address, and where there was none yet tries to write it a second time.
        """
        probe = storage.join(self.address, PROBE)
        if all(self.create_if_absent(probe, secrets.token_bytes(16)) for _ in range(2)):
            raise UserError(
                f"registry {self.address!r}: its store ignores If-None-Match, so that two promotions at the same "
                "time could both succeed; take one that knows it, such as S3, Google's, Azure's, or a folder"
            )

    def create_if_absent(self, address: str, content: bytes) -> bool:
        """Write a file; return False, and write nothing, if there is a file with other content.

        The content must be unlike any other writer's: if the store's reply to a write is lost, the next try meets the
        file, and tells by the content that it is its own.
        """
        with self.explain_failures("written"):
            try:
                storage.retry(address, lambda to: storage.create_file(to, content))
            except ExistsError:
                return storage.retry(address, storage.read_file) == content
        return True

    def champion(self) -> Entry | None:
        """Return the last entry of the log, or None if nothing was promoted.

        Reads champion.json, the entry of which that is a copy, and later entries until one is missing: the copy may be
        late. Lists the log only if champion.json is missing or damaged. Raises a LogError if an entry that it reads is
        damaged or altered; does not read the others.
        """
        last = self.read_copy()
        if last is None and (numbers := self.entry_numbers()):
            last = self.read_entry(numbers[-1])
        while last is not None and (later := self.find_entry(last.number + 1)) is not None:
            last = later
        return last

    def read_copy(self) -> Entry | None:
        """Return the entry in champion.json; None if that file is missing or damaged.

        Raises a LogError if the log has another entry of that number, but not if the log has none.
        """
        with self.explain_failures("read"):
            try:
                copy = Entry.from_file(storage.retry(self.at(CHAMPION), storage.read_file))
            except (MissingError, ValueError, TypeError, KeyError):
                return None
        entry = self.find_entry(copy.number)
        if entry is not None and entry.digest != copy.digest:
            raise LogError(
                f"{self.entry_address(copy.number)} is not what its copy {CHAMPION} is: one of the two was altered; "
                f"restore the entry, or delete {CHAMPION} if that is what was altered"
            )
        return copy

    def history(self, at_least: int = 0) -> list[Entry]:
        """Read the whole log, and return its entries, oldest first; LogError if one is missing, damaged or altered.

        Args:
            at_least: number of entries that the log is known to have; fewer are a LogError.
        """
        entries, faults = self.inspect_log(at_least)
        if faults:
            raise LogError(faults[0])
        return entries

    def inspect_log(self, at_least: int = 0) -> tuple[list[Entry], list[str]]:
        """Read champion.json and the whole log; return the readable entries, oldest first, and a line for each fault.

        ``at_least`` is the number of entries that the log is known to have.
        """
        faults, entries = list[str](), dict[int, Entry]()
        try:
            if copy := self.read_copy():  # before the list: entries that are written meanwhile are not missing
                at_least = max(at_least, copy.number)
        except LogError as error:
            faults.append(error.message)
        numbers = self.entry_numbers()
        for before, number in itertools.pairwise([0, *numbers, max([at_least, *numbers]) + 1]):
            if number > before + 1:
                faults.append(self.missing_entry_error(before + 1).message)
        with ThreadPoolExecutor(READERS) as pool:
            reading = {number: pool.submit(self.read_entry, number) for number in numbers}
        for number, found in reading.items():
            try:
                entries[number] = found.result()
            except LogError as error:
                faults.append(error.message)
                continue
            preceding = entries.get(number - 1)
            if (preceding or number == 1) and entries[number].previous != (preceding.digest if preceding else ""):
                said = "does not follow the entry before it: one of the two was altered; restore them"
                faults.append(f"{self.entry_address(number)} {said}")
        return [*entries.values()], faults

    def entry_numbers(self) -> list[int]:
        """List the log's folder, and return the ascending numbers of its entries."""
        folder = self.at("log")
        with self.explain_failures("listed"):
            try:
                names = [entry.name for entry in storage.retry(folder, lambda of: [*storage.list_files(of)])]
            except MissingError:
                if storage.local_path(folder) is None:  # the bucket is missing: an empty prefix is no error
                    raise
                names = []
        return [int(name.removesuffix(".json")) for name in sorted(filter(ENTRY.fullmatch, names))]

    def read_entry(self, number: int) -> Entry:
        """Read and return the log's entry with that number; raise a LogError if it is missing or damaged."""
        if (entry := self.find_entry(number)) is None:
            raise self.missing_entry_error(number)
        return entry

    def find_entry(self, number: int) -> Entry | None:
        """Read and return the log's entry with that number; None if it is missing. LogError if it is damaged."""
        address = self.entry_address(number)
        with self.explain_failures("read"):
            try:
                content = storage.retry(address, storage.read_file)
            except MissingError:
                return None
        with suppress(ValueError, TypeError, KeyError):
            entry = Entry.from_file(content)
            if entry.number == number:
                return entry
        raise LogError(f"{address} is damaged; restore it, as no entry of the log may be altered")

    def missing_entry_error(self, number: int) -> LogError:
        """Return the error that says that the log's entry with that number is missing."""
        return LogError(f"{self.entry_address(number)} is missing; restore it, as no entry may be deleted")

    def append_entry(self, before: Entry | None, *, by: str, **values: Any) -> Entry:
        """Write the entry after ``before`` to the log, rewrite champion.json, and return the new entry.

        Writes a probe file before, to find out whether the store replaces files.

        Args:
            before: the last entry when this one was decided; None for an empty log.
            by: who writes it: a Flyte execution, or user@host.
            values: the entry's ``action``, ``version``, ``manifest``, ``best`` and ``reason``.

        Raises:
            LostError: somebody else has written the entry of that number.
            UserError: the store replaces files that exist, so that two promotions at the same time could both succeed.
        """
        self.refuse_overwriting_storage()
        number = before.number + 1 if before else 1
        about = {"by": by, "time": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "nonce": secrets.token_hex(16)}
        entry = {"number": number, **values, **about, "previous": before.digest if before else ""}
        content = json.dumps(entry, indent=1).encode() + b"\n"
        if not self.create_if_absent(self.entry_address(number), content):
            raise LostError(self.read_entry(number))
        self.renew_copy(number)
        return Entry.from_file(content)

    def renew_copy(self, number: int) -> None:
        """Copy the entry with that number, and then each later one, to champion.json.

        Each writer goes on until there is no later entry, so that of many writers the last entry remains. Prints a line
        to stdout, and raises nothing, if the registry cannot be read or written.
        """
        try:
            while True:
                content = storage.retry(self.entry_address(number), storage.read_file)
                storage.retry(self.at(CHAMPION), functools.partial(storage.write_file, content=content))
                number += 1
        except MissingError:
            return
        except (UnavailableError, OSError) as error:
            print(f"{self.at(CHAMPION)}: not renewed: {error}; the log counts, which has entry {number}", flush=True)

    @contextmanager
    def explain_failures(self, action: str) -> Iterator[None]:
        """Turn an UnavailableError in the block into a UserError that names the registry.

        ``action`` is what the block does, for the message: read, listed or written.
        """
        try:
            yield
        except UnavailableError as failure:
            said = f"{self.name} cannot be {action}: {failure}; check the address and the rights"
            raise failure.to_user_error(f"registry {self.address!r}: {said}") from None


def entry_file_name(number: int) -> str:
    """Return the file name of the log's entry with that number, such as 00000007.json."""
    return f"{number:08}.json"


class Promotions(NamedTuple):
    """Promotions that a log leaves standing. A rollback undoes the last one, a second rollback the one before it."""

    standing: list[Entry]  # promotions that no rollback undid, oldest first
    taken_back: dict[str, Entry]  # version: the rollback that undid its promotion; without those promoted again


def replay_promotions(history: list[Entry]) -> Promotions:
    """Return which promotions in a whole log stand, and which were taken back."""
    found = Promotions([], {})
    for entry in history:
        if entry.action == PROMOTE:
            found.standing.append(entry)
        else:
            found.taken_back[found.standing.pop().version] = entry
        found.taken_back.pop(entry.version, None)
    return found
