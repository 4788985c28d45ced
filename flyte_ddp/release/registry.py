"""A model's registry in a folder or an object store: a log that only grows, whose last entry names the champion.

    ADDRESS/NAME/log/00000001.json          an entry: who became champion, why, and the digest of the entry before
    ADDRESS/NAME/champion.json              a copy of the last entry, for people
    ADDRESS/NAME/versions/DIGEST/           a model, by the SHA-256 of its weights; see versions.py
    ADDRESS/NAME/judgements/TEST_DIGEST/    what has been judged on a test split; see looks.py

Every file but the copy is written once and never again. So there is nothing to lock, and nothing half done to repair:
of two who want to write the next entry one succeeds, and the other is told so.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
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
READERS = 16  # of entries at a time
PROBE = ".creates-once"  # no model's name; a file that is written to find out whether the store can do that


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
    """An entry of the log."""

    number: int  # from 1
    action: str  # promote or rollback
    version: str  # of the champion from now on
    manifest: str  # SHA-256 of its list of files
    best: str  # the version with the best test accuracy so far, which is not forgotten when others take its place
    reason: str
    by: str  # a Flyte execution, or user@host
    time: str  # ISO 8601, UTC
    previous: str  # SHA-256 of the entry before; empty for the first
    digest: str  # SHA-256 of this one, as it is stored

    @classmethod
    def stored(cls, content: bytes) -> Self:
        """The entry in a file.

        Raises:
            ValueError, TypeError, KeyError: it is none.
        """
        values = {**json.loads(content), "digest": hashlib.sha256(content).hexdigest()}
        found = {field.name: values[field.name] for field in dataclasses.fields(cls)}
        if any(type(found[field.name]).__name__ != field.type for field in dataclasses.fields(cls)):
            raise ValueError("a value of another type")
        return cls(**found)


def check_model_name(name: str) -> None:
    """Refuse a name that cannot be the folder of a model.

    Raises:
        UserError: it is empty, too long, or has other characters.
    """
    if not NAME.fullmatch(name):
        raise UserError(
            f"model name {name!r}: must be letters, digits, '_', '-' and '.' only, and begin with a letter or digit"
        )


class Registry:
    """The registry of one model.

    Args:
        address: of all registries: a path, or an address of S3, Google Cloud Storage or Azure Blob Storage.
        name: of the model.

    Raises:
        UserError: a name that is none, or an address of another kind.

    """

    def __init__(self, address: str, name: str) -> None:
        check_model_name(name)
        if not address or storage.scheme(address) in ("http", "https"):
            raise UserError(f"registry {address!r}: must be a path, or an address of s3://, gs:// or az://; give one")
        self.address, self.name = address, name

    def at(self, *parts: str) -> str:
        """The address of something in it."""
        return storage.join(self.address, "/".join((self.name, *parts)))

    def check_store(self) -> None:
        """Refuses a store that replaces a file although it was told not to: two at once could both become champion.

        Raises:
            UserError: it does, or it cannot be written to.
        """
        probe = storage.join(self.address, PROBE)
        with self.explained("written"):
            if self.created(probe, secrets.token_bytes(16)) and self.created(probe, secrets.token_bytes(16)):
                raise UserError(
                    f"registry {self.address!r}: its store ignores If-None-Match, so that two promotions at the same "
                    "time could both succeed; take one that knows it, such as S3, Google's, Azure's, or a folder"
                )

    def created(self, address: str, content: bytes) -> bool:
        """Writes a file that nobody else writes the same way; False: there is another one of that name.

        An answer may be lost, and the next try find what the one before has written: so the file is read then.
        """
        try:
            storage.retried(address, lambda to: storage.create(to, content))
        except ExistsError:
            return storage.retried(address, storage.read) == content
        return True

    def history(self, at_least: int = 0) -> list[Entry]:
        """All entries of the log, the oldest first; empty where nothing was promoted.

        Args:
            at_least: how many there are known to be.

        Raises:
            UserError: the registry cannot be read, or an entry is missing or altered.
        """
        numbers = self.entry_numbers()
        for number, found in enumerate(numbers, 1):
            if found != number:
                raise self.missing(number, f"and {file_name(found)} is there")
        with ThreadPoolExecutor(READERS) as pool:
            entries = [*pool.map(self.entry, numbers)]
        for before, entry in zip([None, *entries], entries, strict=False):
            if entry.previous != (before.digest if before else ""):
                raise UserError(
                    f"registry {self.address!r}: {self.name}/log/{file_name(entry.number)} does not follow the entry "
                    "before it, one of the two was altered; restore them"
                )
        self.check_end(entries[-1] if entries else None)
        if len(entries) < at_least:
            raise self.missing(at_least, "which a judgement has seen")
        return entries

    def entry_numbers(self) -> list[int]:
        """Return the numbers of the entries that are there, ascending, from a list of the log's folder.

        Raises:
            UserError: it cannot be listed.
        """
        folder = self.at("log")
        with self.explained("listed"):
            try:
                names = [entry.name for entry in storage.retried(folder, lambda of: [*storage.list_files(of)])]
            except MissingError:
                if storage.local_path(folder) is None:
                    raise
                names = []
        return [int(name.removesuffix(".json")) for name in sorted(filter(ENTRY.fullmatch, names))]

    def missing(self, number: int, why: str) -> UserError:
        """The error for an entry that was deleted."""
        return UserError(
            f"registry {self.address!r}: {self.name}/log/{file_name(number)} is missing, {why}; restore it, as no "
            "entry may be deleted"
        )

    def check_end(self, last: Entry | None) -> None:
        """Refuses a log whose last entries were deleted, or altered: the copy for people has them, though maybe late.

        Raises:
            UserError: with the number of the entry.
        """
        with self.explained("read"):
            try:
                copy = Entry.stored(storage.retried(self.at("champion.json"), storage.read))
            except (MissingError, ValueError, TypeError, KeyError):  # it is for people: who alters it harms nobody
                return
            number = last.number if last else 0
            if copy.number < number or (last and copy.digest == last.digest):
                return
            with suppress(MissingError):  # it may be younger than the log that was listed
                content = storage.retried(self.at("log", file_name(copy.number)), storage.read)
                if hashlib.sha256(content).hexdigest() == copy.digest:
                    return
        raise UserError(
            f"registry {self.address!r}: {self.name}/log/{file_name(copy.number)} is missing or was altered, as "
            "champion.json is another one; restore it, or delete champion.json if that is what was altered"
        )

    def entry(self, number: int) -> Entry:
        """An entry of the log that is there."""
        address = self.at("log", file_name(number))
        with self.explained("read"):
            content = storage.retried(address, storage.read)
        try:
            entry = Entry.stored(content)
            if entry.number == number:
                return entry
        except (ValueError, TypeError, KeyError):
            pass
        raise UserError(f"{address}: is damaged; restore it, as no entry of the log may be altered")

    def champion(self) -> Entry | None:
        """Return the last entry, or None where nothing was promoted.

        Reads that entry and champion.json; earlier entries may be lost, which only a promotion has to care about.

        Raises:
            UserError: the registry cannot be read, or the last entry is missing, damaged or altered.
        """
        numbers = self.entry_numbers()
        last = self.entry(numbers[-1]) if numbers else None
        self.check_end(last)
        return last

    def append(self, before: Entry | None, *, by: str, **values: Any) -> Entry:
        """Writes the entry after ``before``, which was the last one when the reason for this one was found.

        Args:
            by: who does it.
            values: the entry's ``action``, ``version``, ``manifest``, ``best`` and ``reason``.

        Raises:
            LostError: somebody else has written one.
            UserError: the store cannot be written to, or does not keep a file from being replaced.
        """
        self.check_store()
        number = before.number + 1 if before else 1
        about = {"by": by, "time": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "nonce": secrets.token_hex(16)}
        entry = {"number": number, **values, **about, "previous": before.digest if before else ""}
        content = json.dumps(entry, indent=1).encode() + b"\n"
        with self.explained("written"):
            won = self.created(self.at("log", file_name(number)), content)
        if not won:
            raise LostError(self.entry(number))
        self.copy_champion(number)
        return Entry.stored(content)

    def copy_champion(self, number: int) -> None:
        """Makes champion.json, the copy for people, the last entry; that it may fail, or be late, harms nobody.

        Args:
            number: of an entry, since which there may have been others.
        """
        address = self.at("champion.json")
        try:
            while True:
                content = storage.retried(self.at("log", file_name(number)), storage.read)
                storage.retried(address, functools.partial(storage.put, content=content))
                number += 1
        except MissingError:
            return
        except (UnavailableError, OSError) as error:
            print(f"{address}: not renewed: {error}; the log counts, which has entry {number}", flush=True)

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Makes what fails in the store an error that names the registry."""
        try:
            yield
        except UnavailableError as failure:
            raise failure.explained(
                f"registry {self.address!r}: {self.name} cannot be {what}: {failure}; check the address and the rights"
            ) from None


def file_name(number: int) -> str:
    """Of an entry of the log."""
    return f"{number:08}.json"


class Promotions(NamedTuple):
    """What a log comes to. A rollback takes the last promotion back, as an undo does; a second one that before it."""

    standing: list[Entry]  # those that were not taken back
    taken_back: dict[str, Entry]  # versions whose promotion was, and which were not champion since, with the rollback


def promotions(history: list[Entry]) -> Promotions:
    """The promotions in a log."""
    found = Promotions([], {})
    for entry in history:
        if entry.action == PROMOTE:
            found.standing.append(entry)
        else:
            found.taken_back[found.standing.pop().version] = entry
        found.taken_back.pop(entry.version, None)
    return found
